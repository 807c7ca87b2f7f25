"""What a bundle cannot be asked for."""

from collections.abc import Sequence

from ..bundle.manifest import Manifest
from ..bundle.reader import known
from ..errors import InputError
from .settings import Settings


def check(manifest: Manifest, prompt: Sequence[int]) -> None:
    """Raises InputError for a prompt that is empty, too long or outside the vocabulary."""
    if not prompt:
        raise InputError("the prompt has no tokens: give at least one")
    if len(prompt) > manifest.capacity:
        raise InputError(
            f"the prompt has {len(prompt)} tokens and the bundle's capacity is {manifest.capacity}: "
            "shorten it, or export with a larger --capacity"
        )
    foreign = next((t for t in prompt if not 0 <= t < manifest.vocabulary), None)
    if foreign is not None:
        raise InputError(f"the prompt holds token id {foreign}, outside the vocabulary of {manifest.vocabulary}")


def check_settings(manifest: Manifest, settings: Settings) -> None:
    """Raises InputError for settings about draft trees if the bundle has no drafter, and for a drafter that it does not
    have."""
    if settings.drafter is not None and settings.drafter not in manifest.drafters:
        raise InputError(f"there is no drafter {settings.drafter!r}: {known(manifest)}")
    about_trees = {"rows": settings.rows, "tree": settings.tree, "accept": settings.accept}
    given = next((name for name, value in about_trees.items() if value not in (None, "exact")), "")
    if given and not manifest.has_drafter:
        raise InputError(
            f"{given} is {about_trees[given]!r}, which is about draft trees, and the bundle has no drafter: leave it "
            "out, or export with --ckpt"
        )
