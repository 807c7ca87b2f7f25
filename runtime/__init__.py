"""Lossless Gumiho speculative decoding over compiled engines, without torch.

from runtime import load
model = load("bundle")
for piece in model.generate("def main():", max_new_tokens=256):
    print(piece, end="")
"""

import logging as _logging

from . import command as _command  # first, since it handles interruptions while the others load
from .decoding.cycle import Cycle
from .decoding.grammar import Grammar
from .decoding.logprobs import TokenLogprobs
from .decoding.settings import Settings
from .decoding.stats import Stats
from .errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError
from .generation import Generation
from .model import Model, load
from .session import Session

__version__ = _command.package_version()
__all__ = [
    "Cycle",
    "DamageError",
    "Generation",
    "Grammar",
    "GumihoError",
    "InputError",
    "MisuseError",
    "Model",
    "Session",
    "Settings",
    "Stats",
    "TokenLogprobs",
    "UnavailableError",
    "__version__",
    "load",
]
_logging.getLogger("gumiho").addHandler(_logging.NullHandler())
