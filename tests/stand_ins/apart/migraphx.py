"""What ``import migraphx`` finds in a child process that has this folder on its path: the stand-in, and the device
under it."""

import sys

from runtime.engines.devices import hip
from tests.stand_ins import migraphx

hip.Hip = migraphx.Hip  # type: ignore[assignment,misc]
sys.modules[__name__] = migraphx
