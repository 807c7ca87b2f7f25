"""An export from what was asked for to what was written. Libraries that are slow to import are imported while progress is shown."""

from typing import TYPE_CHECKING

from .config import ExportConfig
from .progress import Progress

if TYPE_CHECKING:
    from .writing.write import Written


def exported(config: ExportConfig) -> "Written":
    """Reads the checkpoints, and writes the bundle and compiles it, or writes the drafter for vLLM."""
    config.check()
    with Progress() as progress:
        progress.start("reading the checkpoints")
        from .recipe.resolve import resolve
        from .writing.write import write

        return write(resolve(config), progress)


def dry_run(config: ExportConfig) -> None:
    """Prints what ``exported`` would write. Raises what it would raise before it writes."""
    from .recipe.resolve import resolve
    from .writing.write import described, require_writable

    recipe = resolve(config)
    print(described(recipe))
    require_writable(recipe)
