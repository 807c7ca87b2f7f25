"""Lossless Gumiho speculative decoding over compiled engines, without torch.

from runtime import load
model = load("bundle")
for piece in model.generate("def main():", max_new_tokens=256):
    print(piece, end="")
"""

from . import command as _command  # noqa: F401  # the first: it sees to interruptions while the others load
from .decoder import Cycle
from .errors import GumihoError
from .guide import Grammar
from .model import Generation, Model, load
from .session import Session
from .settings import Settings
from .stats import Stats

__all__ = ["Cycle", "Generation", "Grammar", "GumihoError", "Model", "Session", "Settings", "Stats", "load"]
