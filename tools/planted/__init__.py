"""The faults that ``planted_faults`` plants."""

from . import bundles, decoding, graphs
from .fault import Fault

FAULTS = (*decoding.FAULTS, *graphs.FAULTS, *bundles.FAULTS)
__all__ = ["FAULTS", "Fault"]
