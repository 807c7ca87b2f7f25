"""Text that follows a regular expression: python examples/grammar.py BUNDLE (needs the extra 'guided')"""

import sys

from runtime import Grammar, GumihoError, load

if len(sys.argv) < 2:
    sys.exit(__doc__)
try:
    with load(sys.argv[1]) as model:
        print("".join(model.generate("version = ", max_new_tokens=16, grammar=Grammar.regex(r"[0-9]\.[0-9]{1,2}"))))
except GumihoError as error:
    sys.exit(f"error: {error}")
