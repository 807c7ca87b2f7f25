"""Several turns over one cache: only new tokens are read. python examples/session.py BUNDLE"""

import sys

from runtime import GumihoError, load

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    with load(sys.argv[1]) as model:
        session = model.session()
        text = "def read(path):\n"
        for addition in ("", "\n\ndef write(path):\n"):
            text += addition
            turn = session.generate(text, max_new_tokens=16)
            text += "".join(turn)
            print(f"{turn.stats.prompt_tokens} tokens in the prompt, {turn.stats.cached_tokens} of them cached")
        print(text)
except GumihoError as error:
    sys.exit(f"error: {error}")
