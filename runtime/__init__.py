"""Lossless Gumiho speculative decoding over compiled engines, without torch.

from runtime import load
model = load("bundle")
for piece in model.generate("def main():", max_new_tokens=256):
    print(piece, end="")
"""

from .errors import interruption as _interruption  # noqa: F401  # isort: skip  (before all others, to handle what comes while they load)
import logging as _logging
from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .errors import DamageError, GumihoError, InputError, MisuseError, UnavailableError

if _TYPE_CHECKING:
    from .api.generation import Generation
    from .api.loader import load
    from .api.model import Model
    from .api.session import Session
    from .api.stream import Stream
    from .decoding.cycle import Cycle
    from .decoding.grammar import Grammar
    from .decoding.logprobs import TokenLogprobs
    from .decoding.settings import Settings
    from .decoding.stats import Stats

    __version__: str
else:
    # Imported when they are used: they and numpy take most of the time of a ``--help``.
    _MODULES = {
        "Cycle": "decoding.cycle",
        "Generation": "api.generation",
        "Grammar": "decoding.grammar",
        "Model": "api.model",
        "Session": "api.session",
        "Settings": "decoding.settings",
        "Stats": "decoding.stats",
        "Stream": "api.stream",
        "TokenLogprobs": "decoding.logprobs",
        "load": "api.loader",
    }

    def __getattr__(name: str) -> object:
        if name == "__version__":
            from .cli.command import package_version

            value = package_version()
        elif name in _MODULES:
            value = getattr(_import_module(f".{_MODULES[name]}", __name__), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


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
    "Stream",
    "TokenLogprobs",
    "UnavailableError",
    "__version__",
    "load",
]
_logging.getLogger("gumiho").addHandler(_logging.NullHandler())
