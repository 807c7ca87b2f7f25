"""The cards that TensorRT for RTX builds plans for, by compute capability and by name."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..bundle.manifest import RTX
from ..errors import InputError, UnavailableError

if TYPE_CHECKING:
    from ..bundle.reader import Bundle


@dataclass(frozen=True)
class Card:
    """A kind of card. name: its compute capability, such as ``sm86``. cards: some that have it."""

    name: str
    cards: str

    @property
    def capability(self) -> int:
        return int(self.name[2:])


CARDS = {
    card.name: card
    for card in (
        Card("sm75", "GeForce RTX 20, GTX 16, T4 (Turing)"),
        Card("sm80", "A100, A30 (Ampere)"),
        Card("sm86", "GeForce RTX 30, RTX A, A10, A40 (Ampere)"),
        Card("sm89", "GeForce RTX 40, RTX Ada, L4, L40 (Ada)"),
        Card("sm120", "GeForce RTX 50, RTX PRO (Blackwell)"),
        Card("sm121", "DGX Spark (Blackwell)"),
    )
}
_OTHERS = {
    "sm87": ("Jetson Orin", "use --backend tensorrt, with JetPack's TensorRT"),
    "sm90": ("Hopper", "use --backend cuda, or tensorrt with NVIDIA's TensorRT"),
    "sm100": ("Blackwell of data centers", "use --backend cuda, or tensorrt with NVIDIA's TensorRT"),
    "sm103": ("Blackwell of data centers", "use --backend cuda, or tensorrt with NVIDIA's TensorRT"),
    "sm110": ("Jetson Thor", "use --backend tensorrt, with JetPack's TensorRT"),
}
# Patterns of names as vendors spell them, in lower case, words joined by "-".
_NAMES = (
    (r"rtx-20[5-9]0.*|gtx-16\d0.*|t4|(quadro-)?rtx-[3-8]000|titan-rtx", "sm75"),
    (r"a100.*|a30.*", "sm80"),
    (r"rtx-30[5-9]0.*|rtx-a\d{3,4}.*|a(2|10|10g|16|40)", "sm86"),
    (r"rtx-40[5-9]0.*|rtx-\d{3,4}-ada.*|l4|l40s?|l20", "sm89"),
    (r"rtx-50[5-9]0.*|rtx-pro-\d{3,4}.*", "sm120"),
    (r"dgx-spark|gb10", "sm121"),
    (r"(jetson-)?(agx-)?orin.*", "sm87"),
    (r"g?h[12]00.*|hopper", "sm90"),
    (r"g?b[123]00.*", "sm100"),
    (r"(jetson-)?(agx-)?thor.*", "sm110"),
)
# The first capability that has kernels for a format.
_FORMATS = {"bfloat16": 80, "int4": 80, "fp8": 89}


def card(name: str) -> Card:
    """The kind of card that a name means: a compute capability, as ``sm86`` or ``8.6``, or a card, as ``rtx-4090``.
    Raises InputError for what TensorRT for RTX does not build for, and for other names."""
    spelled = "-".join(name.lower().replace("_", "-").split()).removeprefix("nvidia-").removeprefix("geforce-")
    if number := re.fullmatch(r"(?:sm-?)?(\d{1,2})\.?(\d)", spelled):
        found = f"sm{number[1]}{number[2]}"
    else:
        found = next((kind for pattern, kind in _NAMES if re.fullmatch(pattern, spelled)), "")
    if found in _OTHERS:
        kind, instead = _OTHERS[found]
        raise InputError(f"TensorRT for RTX is not for '{name}' ({kind}): {instead}")
    if found not in CARDS:
        known = "; ".join(f"{one.name}: {one.cards}" for one in CARDS.values())
        raise InputError(f"there is no '{name}' among the cards of TensorRT for RTX ({known}): give one of these")
    return CARDS[found]


def card_of(capability: tuple[int, int], device: str) -> Card:
    """The kind of a device. device: its name, for messages. Raises UnavailableError if TensorRT for RTX is not for
    it."""
    try:
        return card("{}.{}".format(*capability))
    except InputError as error:
        raise UnavailableError(f"{device}: {error}") from None


def refusal(kind: Card, formats: Iterable[str]) -> str:
    """Says which of some formats of weights a kind of card has no kernels for, "" if it has them for all."""
    how = next((how for how in formats if kind.capability < _FORMATS.get(how, 0)), "")
    if not how:
        return ""
    first = next(one for one in CARDS.values() if one.capability >= _FORMATS[how])
    return (
        f"{kind.name} ({kind.cards}) has no kernels for {how}, which {first.name} and newer have: export with other "
        "--weights, --draft-weights or --dtype, or leave that card out"
    )


def require(kind: Card, bundle: "Bundle") -> None:
    """Raises UnavailableError if a kind of card has no kernels for a format of the bundle's weights."""
    graphs = bundle.manifest.form(RTX).graphs.values()
    formats = [how.partition(",")[0] for how in bundle.manifest.weights.values()]
    if refused := refusal(kind, [*formats, *(graph.precision for graph in graphs)]):
        raise UnavailableError(refused)
