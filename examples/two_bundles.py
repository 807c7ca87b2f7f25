"""Two streams at once, each with a model of its own: python examples/two_bundles.py BUNDLE BUNDLE"""

import sys
import threading

from runtime import load


def run(bundle: str) -> None:
    with load(bundle, threads=1) as model:
        generation = model.generate("import ", max_new_tokens=32)
        print(f"{bundle}: {''.join(generation)!r}")


threads = [threading.Thread(target=run, args=(bundle,)) for bundle in sys.argv[1:3]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
