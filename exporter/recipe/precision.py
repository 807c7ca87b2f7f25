"""The precision of an export: its preset, its dtype, and how its weights are quantized."""

from dataclasses import replace
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from runtime.backends.processor import overflows, vnni
from runtime.backends.rtx_cards import card, refusal
from runtime.bundle.manifest import RTX
from runtime.errors import GumihoError, InputError

from ..config import AS_IS, DRAFTER, TARGET, ExportConfig

if TYPE_CHECKING:
    import torch

    from ..checkpoints.pair import Pair

# Perplexity of SmolLM2-135M-Instruct on the CPU over 2,046 tokens of instructions and news, by `gumiho quality`
# (docs/quality.md).
_UNQUANTIZED, _PERPLEXITY = "25.5", {"int8": "25.6", "w8a8": "26.0", "int4": "27.7"}
PERPLEXITIES = f"perplexity of SmolLM2-135M-Instruct: fp32 {_UNQUANTIZED}, " + ", ".join(
    f"{to} {p}" for to, p in _PERPLEXITY.items()
)
# One model's speeds on x86 with VNNI and with AVX2 only (docs/benchmarks.md), and its perplexity.
RECOMMENDATION = (
    "--preset fast rounds weights and activations to 8 bits (w8a8, or w8a8-unsigned without VNNI): on x86, "
    "SmolLM2-135M-Instruct decodes 1.7 times as fast plainly and 1.4 times with a drafter, at a perplexity of "
    f"{_PERPLEXITY['w8a8']} instead of {_UNQUANTIZED}"
)


def with_preset(config: ExportConfig) -> ExportConfig:
    """With ``weights`` and ``draft_weights`` as the preset says, unless they are given.

    Raises GumihoError if the preset stands for different weights on two of the backends, which share one copy.
    """
    if config.preset in (None, "full"):
        return config
    by_backend = {name: _target_weights(config.preset, name) for name in config.backend}
    if config.weights is None and len(set(by_backend.values())) > 1:
        meanings = " and ".join(f"{weights} for {name}" for name, weights in by_backend.items())
        raise GumihoError(
            f"--preset {config.preset} means --weights {meanings}, and the backends of a bundle share their weights: "
            "export for one backend at a time, or choose with --weights"
        )
    draft_weights = config.draft_weights
    if config.preset == "small" or set(config.backend) == {"cpu"}:
        draft_weights = draft_weights or "int4"
    return replace(config, weights=config.weights or by_backend[config.backend[0]], draft_weights=draft_weights)


def with_codes(config: ExportConfig, pair: "Pair") -> ExportConfig:
    """With ``weights`` as ``as-is`` for a CPU if nothing was chosen and the target's checkpoint holds most of its
    matrices' numbers in codes that a bundle can keep."""
    from ..weights.source import is_matrix

    if config.weights or config.preset or set(config.backend) != {"cpu"}:
        return config
    sources = pair.target_sources(positions=1).items()
    sizes = {name: prod(source.shape) for name, source in sources if is_matrix(name, source)}
    mostly = 2 * sum(sizes[name] for name in pair.coded()) > sum(sizes.values())
    return replace(config, weights=AS_IS) if mostly else config


def require_codes(config: ExportConfig, pair: "Pair", dtype: "torch.dtype") -> None:
    """Raises InputError unless the target's checkpoint holds codes, if ``as-is`` was asked for, and all backends can
    keep them."""
    from ..backends.specs import BACKENDS
    from ..weights.source import CODED_BLOCK

    if config.weights != AS_IS:
        if config.other_weights:
            raise InputError("--other-weights is for --weights as-is: leave one of the two out")
        return
    coded, where = pair.coded().values(), f"target '{pair.target.source}'"
    if not coded:
        kinds = ", ".join(sorted(pair.target.dtypes()))
        raise InputError(
            f"--weights as-is keeps codes of 4 and 8 bits in blocks of {CODED_BLOCK}, and {where} holds none "
            f"({kinds}): choose int8 or int4, or leave --weights out"
        )
    for name in config.backend:
        spec = BACKENDS[name]
        if spec.block != CODED_BLOCK:
            raise InputError(
                f"--weights as-is is not for {name}, which takes blocks of {spec.block} numbers, and {where} has "
                f"blocks of {CODED_BLOCK}: give --weights int4, or leave {name} out"
            )
    # fp32 holds all fp16 and bf16 scales.
    odd = next((part.scales for part in coded if part.scales != dtype and dtype.itemsize < 4), None)
    if odd:
        names = [str(d).removeprefix("torch.") for d in (odd, dtype)]
        raise InputError(
            f"--weights as-is keeps scales, and {where} has them in {names[0]}, not {names[1]}: choose --dtype fp32"
        )


def _target_weights(preset: str, backend: str) -> str:
    """The scheme of the target's weights. On a GPU a pass mostly reads weights, so fewer bits are faster. On the CPU
    verifying several rows costs less with w8a8 (README: 75.2 tokens per second, 52.1 with int4)."""
    from ..backends.specs import BACKENDS

    if preset != "fast" or "w8a8" not in BACKENDS[backend].quantized:
        return "int4"
    return "w8a8-unsigned" if overflows() else "w8a8"


def recommendation(config: ExportConfig) -> list[str]:
    """Advice for an export that decodes slowly only because nobody chose its precision. None for CPUs other than x86,
    whose speeds are not those that it tells."""
    chosen = config.preset or config.weights
    return [] if chosen or config.backend != ("cpu",) or vnni() is None else [RECOMMENDATION]


def unrunnable(config: ExportConfig) -> list[str]:
    """What this CPU lacks for the weights that the options choose; nothing slow is imported, so that it is said before
    any work."""
    if config.weights != "w8a8" or "cpu" not in config.backend or not overflows():
        return []
    return [
        "w8a8 needs a CPU with VNNI, which this one lacks: the bundle will be written, but not compiled for this CPU; "
        "to run it here, choose --weights w8a8-unsigned, which holds the same numbers"
    ]


def dtypes() -> dict[str, "torch.dtype"]:
    """By the names that ``dtype`` of a config takes."""
    import torch

    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype(config: ExportConfig) -> "torch.dtype":
    """The dtype of the weights that are not quantized. Raises GumihoError if the backends have none in common."""
    from ..backends.specs import BACKENDS

    by_name = dtypes()
    common = [
        d for d in BACKENDS[config.backend[0]].dtypes if all(d in BACKENDS[name].dtypes for name in config.backend)
    ]
    chosen = by_name[config.dtype] if config.dtype else common[0]
    refusing = [name for name in config.backend if chosen not in BACKENDS[name].dtypes]
    if refusing:
        taken = " and ".join(name for name, dtype in by_name.items() if dtype in BACKENDS[refusing[0]].dtypes)
        raise GumihoError(
            f"--dtype {config.dtype} is not for {refusing[0]}, which computes in {taken}: leave one of the two out"
        )
    return chosen


def quantized(config: ExportConfig) -> dict[str, str]:
    """The schemes that the weights of ``target`` and ``draft`` are quantized with; a model that is not quantized is
    left out.

    Raises GumihoError if a backend does not take one of them.
    """
    from ..backends.specs import BACKENDS

    defaults = {BACKENDS[name].drafter for name in config.backend}
    draft = config.draft_weights or (defaults.pop() if len(defaults) == 1 else "none")
    draft = draft if config.ckpt else "none"
    schemes = {"target": ("--weights", config.weights or "none", TARGET), "draft": ("--draft-weights", draft, DRAFTER)}
    for option, scheme, choices in schemes.values():
        refusing = [name for name in config.backend if scheme not in ("none", AS_IS, *BACKENDS[name].quantized)]
        if refusing:
            taken = ", ".join(to for to in BACKENDS[refusing[0]].quantized if to in choices)
            raise GumihoError(
                f"{option} {scheme} is not for {refusing[0]}, which takes {taken}: give one of these, or leave "
                f"{refusing[0]} out"
            )
    return {model: scheme for model, (_, scheme, _) in schemes.items() if scheme != "none"}


def require_rtx(config: ExportConfig, dtype: "torch.dtype") -> None:
    """Raises InputError if TensorRT for RTX cannot build plans of the weights' formats, for a kind of card that is
    asked for or at all, and UnavailableError if plans are to be built and the library is missing."""
    from ..backends.specs import BACKENDS

    apart = [name for name in config.backend if not BACKENDS[name].joins]
    if RTX in config.backend and apart and quantized(config).get("draft") == "int4":
        raise InputError(
            f"--draft-weights int4 is not for {RTX} and {apart[0]} in one bundle: export for {RTX} in a run of its "
            "own, or give --draft-weights none"
        )
    if config.gpu:
        import_module("runtime.backends.tensorrt_rtx")
    formats = [*quantized(config).values(), str(dtype).removeprefix("torch.")]
    for name in config.gpu:
        if refused := refusal(card(name), formats):
            raise InputError(refused)


def require_linkable(config: ExportConfig) -> None:
    """Raises GumihoError if weights are to be linked and a backend cannot read them from a checkpoint's files."""
    from ..backends.specs import BACKENDS

    aligned = [name for name in config.backend if BACKENDS[name].aligned]
    if config.link_weights and aligned:
        raise GumihoError(
            f"--link-weights is not for {aligned[0]}, which reads weights from multiples of 256 bytes, and "
            "checkpoints' files do not align them: leave one of the two out"
        )
