"""Load a bundle and print a continuation: python examples/embed.py BUNDLE [PROMPT]"""

import sys

from runtime import GumihoError, load

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    with load(sys.argv[1]) as model:
        for piece in model.generate(sys.argv[2] if len(sys.argv) > 2 else "def main():", max_new_tokens=32):
            print(piece, end="", flush=True)
    print()
except GumihoError as error:
    sys.exit(f"error: {error}")
