"""Compiles and checks the engines of a new bundle, for the backends that run on this machine."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.bundle.manifest import RTX
from runtime.errors import GumihoError

from ..progress import Progress

if TYPE_CHECKING:
    from runtime.backends import Backend

    from ..recipe.recipe import Recipe


@dataclass(frozen=True)
class Compiled:
    """A backend's engines, or the reason why there are none.

    backend: None if it cannot run here. folder: name of the engines' folder. errors: by check, ``golden run`` or
    ``validation``, then by output. plans: folders of plans that were built for other devices.
    """

    name: str
    backend: "Backend | None" = None
    folder: str = ""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    problem: str = ""
    plans: tuple[str, ...] = ()


def compile_here(name: str, recipe: "Recipe", folder: Path, progress: Progress) -> Compiled:
    """Compiles a bundle for a backend. Raises GumihoError if the backend runs here and its engines are wrong."""
    from runtime.backends import backend
    from runtime.bundle.reader import Bundle
    from runtime.engines.memory_check import require
    from runtime.engines.store import MEASURING, compile_engines

    plans = _plans(recipe, folder, progress) if name == RTX else ()
    try:
        device = backend(name, recipe.config.device)
        require(Bundle(folder), device, compiling=True)
    except GumihoError as error:
        return Compiled(name, plans=plans, problem=str(error))

    def step(text: str) -> None:
        if text == MEASURING:
            progress.start(f"measuring passes on {name}")
        progress.tell(text)

    progress.start(f"compiling for {name}")
    engines, errors = compile_engines(Bundle(folder), device, progress=step)
    checks = {"golden run": errors}
    if recipe.config.validate:
        from .validate import validate

        progress.start(f"validating on {name}")
        checks["validation"] = validate(recipe, folder, name, recipe.config.device)
    return Compiled(name, device, engines.name, checks, plans=plans)


def _plans(recipe: "Recipe", folder: Path, progress: Progress) -> tuple[str, ...]:
    """Builds the plans that ``--gpu`` asks for. Returns the names of their folders."""
    from runtime.bundle.reader import Bundle
    from runtime.engines.plans_without_device import build_plans

    if recipe.config.gpu:
        progress.start(f"building plans for {', '.join(recipe.config.gpu)}")
    return tuple(build_plans(Bundle(folder), card, progress.tell).name for card in recipe.config.gpu)
