"""gumiho-export: reads checkpoints, traces ``graphs``, packs weights, writes bundles.

from exporter import ExportConfig, export

bundle = export(ExportConfig(ckpt=("demo/drafter",), target="demo/target"))
"""

from pathlib import Path
from typing import TYPE_CHECKING

import runtime  # noqa: F401  first, since it handles interruptions while libraries load

if TYPE_CHECKING:
    from .config import DraftTree, ExportConfig
else:

    def __getattr__(name: str) -> object:
        """Imported when they are used, because they and numpy take most of the time of a ``--help``."""
        if name not in ("DraftTree", "ExportConfig"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import config

        return getattr(config, name)


__all__ = ["DraftTree", "ExportConfig", "export"]


def export(config: "ExportConfig") -> Path:
    """Writes a bundle, or the drafter for vLLM, and returns its folder. Progress is shown on standard error.

    The folder is written completely or not at all; after an interruption the same call continues. Raises InputError for
    a config that cannot be exported, DamageError for damaged checkpoints, for engines that compute something else than
    PyTorch, and if ``validate`` finds errors above their limits, and UnavailableError if the disk is too small or
    another export writes the folder.
    """
    from .exporting import exported

    written = exported(config)
    written.require_valid()
    return written.folder
