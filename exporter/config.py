"""What an export is asked for. The command line's options and a Python caller make the same."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from runtime.backends import NAMES
from runtime.backends.rtx_cards import card
from runtime.bundle.manifest import RTX
from runtime.errors import InputError

from .checkpoints.families import EAGLE, EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL
from .staging import unfinished

DEFAULT_CAPACITY = 2048  # positions, at most
VLLM = "vllm"  # writes only the drafter, in vLLM's format
DRAFTER = ("int8", "int4", "fp8")  # schemes of one backend or another
INTEGERS = ("w8a8", "w8a8-unsigned")  # products of integers
TARGET = (*DRAFTER, *INTEGERS)
AS_IS = "as-is"  # the codes that the target's checkpoint holds
POLICIES = ("dynamic", "chain", "static")
_SPELLED = {"reference": "draft-tree reference"}  # options that have another name than their field
_SHAPING = "heads", "serial_steps", "top_k", "head_top_k", "beam", "reference"
_DRAFTING = (
    "draft_weights",
    "draft_vocab",
    "draft_text",
    *_SHAPING,
    "taps",
    "norm_before_residual",
    "draft_rope_theta",
    "family",
)
_OF_BUNDLES = "validate", "link_weights", "device", "capacity", "rows", *_SHAPING
# The values of fields that have only a few; None may stand for each of them.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "family": (GUMIHO, EAGLE, EAGLE_3, SMALL, MEDUSA, HYDRA),
    "backend": (*NAMES, VLLM),
    "preset": ("fast", "small", "full"),
    "dtype": ("fp32", "fp16", "bf16"),
    "weights": (*TARGET, AS_IS, "none"),
    "other_weights": ("int8", "none"),
    "draft_weights": (*DRAFTER, "none"),
    "policy": POLICIES,
}


def _require_choices(config: Any) -> None:
    """Raises InputError for a field with a value that is none of its ``CHOICES``."""
    for name, choices in CHOICES.items():
        value = getattr(config, name, None)
        for one in value if isinstance(value, tuple) else (value,):
            if one is not None and one not in choices:
                raise InputError(f"{name} is {one!r}: give one of {', '.join(choices)}")


@dataclass(frozen=True, kw_only=True)
class DraftTree:
    """The tree that the drafter grows. Numbers that are None are those of the drafter's family and of the number of
    rows.

    policy: ``dynamic`` for the best rows of all candidates, ``chain`` for one token a level, ``static`` for the fixed
    tree of the code of EAGLE-1, Medusa or Hydra. reference: build exactly the official code's trees, Gumiho's two
    quirks included. serial_steps: levels drafted by the serial layers (2; EAGLE up to 6). heads: levels drafted by the
    heads (all of the checkpoint's with 64 rows). top_k: candidate tokens per serial node (14; EAGLE 10). head_top_k:
    candidate tokens per path and head (35; for cuda 32). beam: serial nodes that are expanded, with which drafting cost
    grows (14 with 64 rows; EAGLE 10).
    """

    policy: str = "dynamic"
    reference: bool = False
    serial_steps: int | None = None
    heads: int | None = None
    top_k: int | None = None
    head_top_k: int | None = None
    beam: int | None = None

    def __post_init__(self) -> None:
        _require_choices(self)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """What to export, and how. The fields are the options of ``gumiho-export``, and mean the same (``gumiho-export
    --help-all``).

    ckpt: the drafters, folders or hub ids; none for a target only. target: a folder, a GGUF file or a hub id; None for
    the one that a released drafter is known to belong to. out: the folder to write; None for NAME-BACKEND. capacity: in
    positions. gpu: the kinds of cards to build plans of TensorRT for RTX for, see ``runtime.backends.rtx_cards.card``.
    draft_tree: see ``DraftTree``. norm_before_residual: None for what the drafter's config.json says.
    validate: raises DamageError, with the bundle in its place, if its engines are further from PyTorch than allowed.

    Raises InputError for values that no export has.
    """

    ckpt: tuple[str | Path, ...] = ()
    family: str | None = None
    target: str | Path | None = None
    out: str | Path | None = None
    overwrite: bool = False
    backend: tuple[str, ...] = ("cpu",)
    device: str = ""
    gpu: tuple[str, ...] = ()
    preset: str | None = None
    dtype: str | None = None
    weights: str | None = None
    other_weights: str | None = None
    draft_weights: str | None = None
    calibrate: Path | None = None
    draft_tree: DraftTree = field(default_factory=DraftTree)
    rows: int | None = None
    taps: tuple[int | str, ...] = ()
    norm_before_residual: bool | None = None
    draft_rope_theta: float | None = None
    capacity: int | None = None
    draft_vocab: int | None = None
    draft_text: tuple[Path, ...] = ()
    link_weights: bool = False
    validate: bool = False

    def __post_init__(self) -> None:
        for name in ("ckpt", "backend", "gpu", "taps", "draft_text"):
            if not isinstance(getattr(self, name), tuple):
                raise InputError(f"{name} is {getattr(self, name)!r}: give a tuple")
        if not self.ckpt and self.target is None:
            raise InputError(
                "nothing to export: name a drafter with --ckpt, or a model without a drafter with --target"
            )
        if not self.backend:
            raise InputError(f"backend is empty: give one of {', '.join(CHOICES['backend'])}")
        _require_choices(self)

    @property
    def folder(self) -> Path:
        """The folder to write. Raises InputError if no folder can have that name."""
        source = Path(self.ckpt[0] if self.ckpt else self.target or "")
        name = source.stem if source.suffix.lower() == ".gguf" else source.name
        out = Path(self.out or f"{name}-{self.backend[0]}")
        try:
            out = out.expanduser()
            unfinished(out).exists()  # the longest of the names that will be used
        except (OSError, RuntimeError) as error:
            text = str(out)
            shown = text if len(text) <= 60 else f"{text[:60]}..."
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"'{shown}' cannot be the name of a folder ({reason}): name another one with --out"
            ) from None
        return out

    def check(self) -> None:
        """Raises InputError for what contradicts itself whatever the checkpoints are; nothing slow is imported for
        that."""
        if not self.ckpt:
            self._require_no_drafting()
        _ = self.folder
        if self.gpu and RTX not in self.backend:
            raise InputError(f"--gpu is for --backend {RTX}: leave it out, or export for that backend too")
        for name in self.gpu:
            card(name)
        if VLLM in self.backend:
            self._require_vllm()
        elif self.device and len(self.backend) > 1:
            raise InputError(
                f"--device {self.device} belongs to one backend: leave it out, or export for that backend only"
            )
        elif self.device and self.backend == ("cpu",):
            raise InputError(f"there is no device '{self.device}' of backend cpu: leave --device out")

    def _given(self, names: Iterable[str]) -> list[str]:
        """The options among the named ones that are not as without them, as the command line spells them."""
        given = {f.name: getattr(part, f.name) != f.default for part in (self, self.draft_tree) for f in fields(part)}
        return [f"--{_SPELLED.get(name, name).replace('_', '-')}" for name in names if given[name]]

    def _require_no_drafting(self) -> None:
        """Raises InputError for an option that needs a drafter."""
        given = self._given(_DRAFTING)
        given += ["--draft-tree chain"] * (self.draft_tree.policy == "chain") + ["--backend vllm"] * (
            VLLM in self.backend
        )
        if given:
            raise InputError(
                f"{given[0]} is for a drafter, and there is none: name one with --ckpt, or leave the option out"
            )

    def _require_vllm(self) -> None:
        """Raises InputError for an option that means nothing to ``--backend vllm``."""
        if given := self._given(_OF_BUNDLES):
            raise InputError(f"{given[0]} means nothing to --backend vllm, which builds no tree: leave it out")
        if self.weights or self.other_weights or self.draft_weights or self.preset or self.calibrate:
            raise InputError(
                "--preset, --weights, --other-weights, --draft-weights and --calibrate mean nothing to --backend vllm, "
                "which quantizes on its own: leave them out"
            )
        if self.draft_vocab is not None or self.draft_text:
            raise InputError(
                "--draft-vocab and --draft-text mean nothing to --backend vllm, whose drafter has a row of lm_head for "
                "every token: leave them out"
            )
        if len(self.ckpt) > 1:
            raise InputError("--backend vllm writes one drafter: name one with --ckpt")
        if len(self.backend) > 1:
            raise InputError("--backend vllm writes no bundle: export for the other backends in a run of their own")
