"""Writes what a recipe says: a bundle with its engines, or a drafter for vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle.reader import Bundle
from runtime.engines.summary import too_large
from runtime.errors import DamageError

from ..checkpoints import vllm
from ..disk import require_space
from ..progress import Progress
from ..recipe.recipe import Recipe
from ..recipe.resolve import VllmRecipe
from ..staging import staged
from . import bundle
from .calibration import calibrated, cost
from .engines import Compiled, compile_here
from .summary import report


@dataclass(frozen=True)
class Written:
    """folder: what was made. report: lines for the user about it. invalid: the outputs that --validate found too far
    off."""

    folder: Path
    report: str
    invalid: tuple[str, ...] = ()

    def require_valid(self) -> None:
        """Raises DamageError if --validate found errors above their limits."""
        if self.invalid:
            raise DamageError(
                f"--validate: '{self.folder}' was written, but differs from PyTorch by more than the limits "
                f"({', '.join(self.invalid)}): do not use it; export again with another --dtype, --weights or "
                "--draft-weights, or report this as a bug"
            )


def write(recipe: Recipe | VllmRecipe, progress: Progress) -> Written:
    """Writes the folder completely or not at all. Raises GumihoError if that is impossible."""
    require_space(recipe.disk(), recipe.config.folder)
    return _write_bundle(recipe, progress) if isinstance(recipe, Recipe) else _write_drafter(recipe, progress)


def _write_bundle(recipe: Recipe, progress: Progress) -> Written:
    _ = recipe.pair.tokenizer  # if it is damaged, before anything is packed
    out, device = recipe.config.folder, recipe.config.device
    with staged(out, recipe.config.overwrite, fingerprint=recipe.fingerprint()) as folder:
        recipe = calibrated(recipe, progress)
        rounding = bundle.write(recipe, folder, progress)
        engines = [compile_here(name, recipe, folder, progress) for name in recipe.backends]
        compiled = next((one.name for one in engines if one.folder), "")
        costs = cost(recipe, folder, compiled, device, progress) if compiled else ""
    written = Bundle(out)
    return Written(out, report(written, recipe, engines, rounding, costs), _invalid(written, engines))


def _invalid(written: Bundle, engines: Sequence[Compiled]) -> tuple[str, ...]:
    manifest = written.manifest
    return tuple(
        f"{output} on {one.name}"
        for one in engines
        for output in too_large(one.errors.get("validation", {}), manifest.form(one.name), manifest.deepest)
    )


def _write_drafter(recipe: VllmRecipe, progress: Progress) -> Written:
    pair, out = recipe.pair, recipe.config.folder
    with staged(out, recipe.config.overwrite, vllm.is_export) as folder:
        progress.start("writing the drafter", recipe.disk())
        size = vllm.write(pair, folder, recipe.dtype, progress.advance)
    return Written(out, "\n".join([f"{out}: {size / 1e6:.1f} MB", *vllm.lines(pair, out)]))
