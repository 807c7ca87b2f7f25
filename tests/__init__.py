"""The suite.

The garbage collector looks through young objects every 50,000 of them instead of every 700: imports and exports make
millions that stay.
"""

import gc

gc.set_threshold(50_000, 20, 20)
