"""The command line of ``gumiho-export``, and the plan that its options make."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.backends import DEVICES, NAMES
from runtime.cli.command import argument_parser
from runtime.errors import GumihoError, InputError

from . import precision
from .checkpoints.families import EAGLE, EAGLE_3, GUMIHO, HYDRA, MEDUSA, SMALL

if TYPE_CHECKING:
    from .plan import Plan

_DEFAULT_CAPACITY = 2048
_DRAFTING = (
    "draft_weights", "draft_vocab", "draft_text", "heads", "serial_steps", "top_k", "head_top_k", "beam", "compat", "taps",
    "norm_before_residual", "draft_rope_theta", "family",
)  # fmt: skip


class _Drafters(argparse.Action):
    """``ckpt`` becomes the first drafter, ``further`` the others."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        namespace.ckpt, *namespace.further = values


def parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        "export", "Exports a target model, with or without a Gumiho drafter, to a bundle.", prog="gumiho-export"
    )
    files = parser.add_argument_group("sources and output")
    files.add_argument(
        "--ckpt", nargs="+", action=_Drafters,
        help="drafter, of Gumiho, EAGLE, Medusa or Hydra, or a small model: a folder, or a hub id such as amd/Gumiho-llama3-8b; or several, over "
        "the same target, of which each text uses one (default: none; the bundle then decodes plainly and by prompt lookup)",
    )  # fmt: skip
    files.set_defaults(further=())
    files.add_argument(
        "--family", choices=(GUMIHO, EAGLE, EAGLE_3, SMALL, MEDUSA, HYDRA),
        help="what kind of drafter it is, if its tensors do not tell (default: what they tell)",
    )  # fmt: skip
    files.add_argument(
        "--target",
        help="target model: a folder, a GGUF file, or on the hub owner/name or owner/name/file.gguf (default: known for the released "
        "drafters)",
    )
    files.add_argument(
        "--out", type=Path,
        help="folder to write (default: NAME-BACKEND, from --ckpt, or else --target, and the first --backend)",
    )  # fmt: skip
    files.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    numbers = parser.add_argument_group("backends and precision")
    numbers.add_argument(
        "--backend", nargs="+", choices=(*NAMES, "vllm"), default=["cpu"], metavar="NAME",
        help=f"backends to export for, one or more of {', '.join(NAMES)}; or vllm, which writes only the drafter, in vLLM's format "
        "(default: cpu)",
    )  # fmt: skip
    numbers.add_argument("--device", default="", help=DEVICES)
    numbers.add_argument(
        "--preset", choices=precision.PRESETS,
        help="fast: what decodes fastest on the backend (--weights w8a8 --draft-weights int4 on the CPU, which on x86 needs VNNI; --weights "
        "int4 on GPUs, where it was not measured yet); small: int4 for target and drafter; full: the target is not quantized, so that the output is "
        f"exactly the checkpoint's. --weights and --draft-weights override it. Both fast and small change the output: {precision.PERPLEXITIES} "
        "(default: full)",
    )  # fmt: skip
    numbers.add_argument(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        help="precision of weights and KV caches; with bf16 weights the caches are fp16 "
        "(default: fp32 on the CPU, fp16 elsewhere; for vllm as in the checkpoint)",
    )
    numbers.add_argument(
        "--weights", choices=(*precision.TARGET, precision.AS_IS, "none"),
        help="quantize the target's matrices except the embedding. int8 and int4: weights only, but on the CPU they also round "
        "activations to 8 bits; int8 is not for tensorrt. fp8: only for tensorrt. w8a8: only for the CPU, on x86 with VNNI; int8 "
        "weights, with one scale per matrix row, and int8 activations, multiplied in integers, so that verifying more rows costs "
        f"little. On the CPU, {precision.PERPLEXITIES}. as-is: keep the codes and scales of a target "
        "in GGUF (Q8_0, Q4_0), GPTQ, AWQ or compressed-tensors (default: what "
        "--preset says; else as-is on the CPU if the target holds most matrices so, or none)",
    )  # fmt: skip
    numbers.add_argument(
        "--other-weights", choices=("int8", "none"),
        help="with --weights as-is, quantize the matrices that the target holds in another way, or turn them into floats, which makes "
        "every pass slower (default: int8)",
    )  # fmt: skip
    numbers.add_argument(
        "--draft-weights", choices=(*precision.DRAFTER, "none"),
        help="quantize the drafter's matrices, its lm_head included; never changes the output "
        "(default: int4 on the CPU, none elsewhere)",
    )  # fmt: skip
    numbers.add_argument(
        "--calibrate", type=Path, metavar="FILE",
        help="quantize the target by what the first 512 tokens of this UTF-8 text show to be large: for int4 on cpu and cuda, and for "
        "int8 and w8a8 on the CPU alone (default: a page of English and code)",
    )  # fmt: skip
    tree = parser.add_argument_group("the tree")
    tree.add_argument(
        "--policy", choices=("dynamic", "chain", "static"), default="dynamic",
        help="draft a tree, or one chain as vLLM does, or the fixed tree of the code of EAGLE-1, Medusa or Hydra (default: dynamic)",
    )  # fmt: skip
    tree.add_argument(
        "--compat", choices=("reference",),
        help="build exactly the same trees as the official code, the two quirks of Gumiho's included (default: off)",
    )  # fmt: skip
    tree.add_argument(
        "--rows", type=int, metavar="R",
        help="rows that the target verifies in one pass, root included; without a drafter those of looked-up tokens "
        "(default: 8 on the CPU, 64 elsewhere, or 16 there with --weights int4)",
    )  # fmt: skip
    tree.add_argument(
        "--serial-steps", type=int, metavar="N", help="levels drafted by the serial layers (default: 2; EAGLE up to 6)"
    )
    tree.add_argument(
        "--heads", type=int, metavar="N",
        help="levels drafted by the heads (default: depends on --rows; all heads of the checkpoint at 64)",
    )  # fmt: skip
    tree.add_argument("--top-k", type=int, metavar="N", help="candidate tokens per serial node (default: 14; EAGLE 10)")
    tree.add_argument(
        "--head-top-k", type=int, metavar="N", help="candidate tokens per path and head (default: 35, for cuda 32)"
    )
    tree.add_argument(
        "--beam", type=int, metavar="N",
        help="serial nodes that are expanded; drafting cost grows with it (default: depends on --rows; 14 at 64, EAGLE 10)",
    )  # fmt: skip
    drafter = parser.add_argument_group(
        "what an EAGLE-3's config.json may not say, or say wrongly; none of it changes the output"
    )
    drafter.add_argument(
        "--taps", nargs="+", metavar="N",
        help="layers of the target whose inputs it reads; or 'output', if the numbers in its config.json are of layers whose outputs are "
        "meant (default: config.json's, else the official code's: 2, half of the layers, and three before the last)",
    )  # fmt: skip
    drafter.add_argument(
        "--norm-before-residual",
        choices=("yes", "no"),
        help="whether its layer adds to the normed features (default: config.json's)",
    )
    drafter.add_argument(
        "--draft-rope-theta", type=float, metavar="BASE", help="base of the drafter's rotary embedding (default: config.json's)"
    )
    sizes = parser.add_argument_group("size and memory")
    sizes.add_argument(
        "--capacity", type=int, metavar="S",
        help=f"positions of the KV caches (default: the target's maximum or sliding window, but at most {_DEFAULT_CAPACITY})",
    )  # fmt: skip
    sizes.add_argument(
        "--draft-vocab", type=int, metavar="N",
        help="draft only the N most frequent tokens, which makes the drafter's lm_head smaller "
        "(default: the checkpoint's token_map, or all tokens)",
    )  # fmt: skip
    sizes.add_argument(
        "--draft-text", nargs="+", type=Path, default=[], metavar="FILE",
        help="text in which --draft-vocab counts tokens: text files, or .jsonl with 'prompt', 'text' or 'turns' "
        "(default: none; --draft-vocab then takes the tokens that the tokenizer learned first)",
    )  # fmt: skip
    sizes.add_argument(
        "--link-weights", action="store_true",
        help="hard-link the checkpoint's .safetensors files instead of copying the tensors that the backends can read directly "
        "(default: copy)",
    )  # fmt: skip
    checks = parser.add_argument_group("checks")
    checks.add_argument(
        "--dry-run", action="store_true", help="print what would be written and the memory and disk it needs; write nothing"
    )
    checks.add_argument(
        "--validate", action="store_true",
        help="run the bundle against eager PyTorch and print the largest errors; exit with status 1 if they exceed their limits",
    )  # fmt: skip
    return parser


def parsed(argv: list[str] | None) -> argparse.Namespace:
    """The options of a command line, at least one source among them."""
    options = parser()
    args = options.parse_args(argv)
    if args.ckpt is None and args.target is None:
        options.error("nothing to export: name a drafter with --ckpt, or a model without a drafter with --target")
    return args


def require_drafter(args: argparse.Namespace) -> None:
    """Raises InputError for an option that needs a drafter if there is none."""
    given = [f"--{name.replace('_', '-')}" for name in _DRAFTING if getattr(args, name) not in (None, [])]
    given += ["--policy chain"] * (args.policy == "chain") + ["--backend vllm"] * ("vllm" in args.backend)
    if args.ckpt is None and given:
        raise InputError(f"{given[0]} is for a drafter, and there is none: name one with --ckpt, or leave the option out")


def plan(args: argparse.Namespace) -> "Plan":
    """Everything that the options decide. Raises GumihoError for options or checkpoints that cannot be exported."""
    from .plan import Plan
    from .sources import open_pair, trim
    from .trees import chain_config, tree_config

    precision.apply_preset(args)
    pair = open_pair(args)
    precision.keep_codes(args, pair)
    # A damaged tokenizer is refused now, not after all weights have been packed.
    if args.dry_run:
        pair.check_tokenizer()
    else:
        _ = pair.tokenizer
    trim(args, pair)
    limit, window = pair.target_config.positions, pair.target_config.sliding_window
    capacity = min(limit, _DEFAULT_CAPACITY) if args.capacity is None else args.capacity
    if window and window < capacity <= pair.target_config.max_position_embeddings:
        raise GumihoError(
            f"--capacity is {capacity}, but target '{pair.target.source}' has a sliding window of {window} positions, and "
            f"a bundle attends to all positions: give --capacity {limit} or less"
        )
    if not 4 <= capacity <= limit:
        raise GumihoError(
            f"--capacity is {capacity}: give 4 to {limit}, the positions that target '{pair.target.source}' knows"
        )
    backends = tuple(dict.fromkeys(args.backend))
    tree = tree_config(args, pair) if pair.has_drafter else chain_config(args, capacity)
    if tree.rows > capacity:
        raise InputError(
            f"--capacity is {capacity}, fewer positions than the {tree.rows} rows of a pass: give {tree.rows} or more, or fewer --rows"
        )
    in_dtype = precision.dtype(args)
    precision.require_codes(args, pair, in_dtype)
    plan = Plan(
        pair, tree, capacity, in_dtype, backends, precision.quantized(args), precision.linking(args), args.other_weights or "int8"
    )  # fmt: skip
    if args.further:
        from .several import with_further

        plan = with_further(args, plan)
    if plan.calibrates or args.calibrate is not None:
        from .calibration import calibration_text

        plan = replace(plan, calibration=calibration_text(plan, args.calibrate, args.dry_run))
    plan.require_links()
    return plan
