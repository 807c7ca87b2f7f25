"""Builds plans of TensorRT for RTX for a kind of card, on any machine."""

from collections.abc import Callable
from pathlib import Path

from ..backends import rtx_cards
from ..bundle.reader import Bundle
from .store import key, new_folder


def build_plans(bundle: Bundle, card: str, progress: Callable[[str], object] = lambda _: None) -> Path:
    """Builds plans into the bundle. They have computed nothing yet, so they are not ``proven``.

    card: see ``rtx_cards.card``. progress: gets each step as text. Returns their folder. Raises InputError for other
    cards, and GumihoError if the library is missing or they cannot be built.
    """
    kind = rtx_cards.card(card)
    from ..backends.tensorrt_rtx import TensorRTForRTX, build_for, versions

    full_key = key(bundle, TensorRTForRTX.NAME, versions(kind))
    with new_folder(bundle, full_key, progress) as (partial, keep):
        build_for(bundle, kind, partial, progress)
        return keep(False)
