"""Lossless Gumiho speculative decoding over compiled engines, without torch.

from runtime import load
model = load("bundle")
for piece in model.generate("def main():", max_new_tokens=256):
    print(piece, end="")
"""

from . import command as _command  # the first: it sees to interruptions while the others load
from .decoding.cycle import Cycle
from .decoding.grammar import Grammar
from .decoding.settings import Settings
from .decoding.stats import Stats
from .errors import GumihoError
from .generation import Generation
from .model import Model, load
from .session import Session

__version__ = _command.package_version()
__all__ = ["Cycle", "Generation", "Grammar", "GumihoError", "Model", "Session", "Settings", "Stats", "__version__", "load"]
