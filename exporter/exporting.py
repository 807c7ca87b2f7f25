"""An export from what was asked for to what was written. Libraries that are slow to import are imported while progress
is shown."""

from typing import TYPE_CHECKING

from .config import ExportConfig
from .disk import require_space
from .progress import Progress
from .staging import is_bundle, require_place

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
    from .checkpoints import vllm
    from .recipe.resolve import VllmRecipe, resolve
    from .writing.summary import describe

    recipe = resolve(config)
    print(describe(recipe))
    require_place(config.folder, config.overwrite, vllm.is_export if isinstance(recipe, VllmRecipe) else is_bundle)
    require_space(recipe.disk(), config.folder)
