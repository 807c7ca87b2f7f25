"""Cancel a generation from another thread, as a server does when its client goes away:
python examples/stream_and_cancel.py BUNDLE"""

import sys
import threading

from runtime import GumihoError, load

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    with load(sys.argv[1]) as model:
        generation = model.generate("import os\n", max_new_tokens=1000)
        threading.Timer(0.2, generation.cancel).start()
        for piece in generation:
            print(piece, end="", flush=True)
        print(f"\n{len(generation.ids)} tokens, finished by {generation.finish_reason}")
except GumihoError as error:
    sys.exit(f"error: {error}")
