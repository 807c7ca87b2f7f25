"""``gumiho-export``: a target, with or without a Gumiho drafter -> a bundle."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.cli.command import run
from runtime.errors import DamageError, GumihoError

from .options import parsed, plan, require_drafter
from .staging import interruptible, require_place, resumable, staged, unfinished
from .summary import describe, report

if TYPE_CHECKING:
    from runtime.bundle.reader import Bundle

    from .engines import Compiled
    from .plan import Plan


def export(args: argparse.Namespace) -> None:
    require_drafter(args)
    out = _out(args)
    if "vllm" in args.backend:
        export_vllm(args, out)
    elif args.dry_run:
        export_nothing(args, out)
    else:
        export_bundle(args, out)


def export_nothing(args: argparse.Namespace, out: Path) -> None:
    """A dry run."""
    from .disk import require_space

    planned = _planned(args)
    print(describe(planned, out, args))
    require_place(out, args.overwrite)
    require_space(planned.disk(), out)


def export_bundle(args: argparse.Namespace, out: Path) -> None:
    """Reads the checkpoints, writes the bundle, compiles it and prints a summary.

    Raises DamageError, with the bundle in place, if --validate finds errors above their limits.
    """
    from .precision import unrunnable
    from .progress import Progress

    for line in unrunnable(args):
        print(f"note: {line}", file=sys.stderr)
    with Progress() as progress:
        progress.start("reading the checkpoints")
        from runtime.bundle.reader import Bundle

        from . import bundle
        from .calibration import calibrated, cost
        from .disk import require_space
        from .engines import compile_here

        planned = _planned(args)
        require_space(planned.disk(), out)
        with staged(out, args.overwrite, fingerprint=planned.fingerprint()) as folder:
            planned = calibrated(planned, progress)
            bundle.write(planned, folder, progress)
            engines = [compile_here(name, args, planned, folder, progress) for name in planned.backends]
            compiled = next((one.name for one in engines if one.folder), "")
            costs = cost(planned, folder, compiled, args.device, progress) if compiled else ""
    written = Bundle(out)
    print(report(written, planned, engines, args, costs))
    _require_valid(written, engines)


def _require_valid(bundle: "Bundle", engines: "list[Compiled]") -> None:
    from runtime.engines.summary import too_large

    manifest = bundle.manifest
    over = [
        f"{output} on {one.name}"
        for one in engines
        for output in too_large(one.errors.get("validation", {}), manifest.form(one.name), manifest.deepest)
    ]
    if over:
        raise DamageError(
            f"--validate: '{bundle.path}' was written, but differs from PyTorch by more than the limits ({', '.join(over)}): "
            "do not use it; export again with another --dtype, --weights or --draft-weights, or report this as a bug"
        )


def _planned(args: argparse.Namespace) -> "Plan":
    """Raises GumihoError for options or checkpoints that cannot be exported."""
    if args.device and len(args.backend) > 1:
        raise GumihoError(f"--device {args.device} belongs to one backend: leave it out, or export for that backend only")
    if args.device and args.backend == ["cpu"]:
        raise GumihoError(f"there is no device '{args.device}' of backend cpu: leave --device out")
    return plan(args)


def export_vllm(args: argparse.Namespace, out: Path) -> None:
    """Writes only the drafter: vLLM reads the target's checkpoint itself."""
    import torch

    from .checkpoints import vllm
    from .disk import require_space
    from .progress import Progress
    from .sources import open_pair

    for option in (
        "validate", "link_weights", "device", "capacity",
        "compat", "rows", "serial_steps", "heads", "top_k", "head_top_k", "beam",
    ):  # fmt: skip
        if getattr(args, option):
            raise GumihoError(
                f"--{option.replace('_', '-')} means nothing to --backend vllm, which builds no tree: leave it out"
            )
    if args.weights or args.other_weights or args.draft_weights or args.preset or args.calibrate:
        raise GumihoError(
            "--preset, --weights, --other-weights, --draft-weights and --calibrate mean nothing to --backend vllm, which quantizes on "
            "its own: leave them out"
        )
    if args.draft_vocab is not None or args.draft_text:
        raise GumihoError(
            "--draft-vocab and --draft-text mean nothing to --backend vllm, whose drafter has a row of lm_head for every token: "
            "leave them out"
        )
    if args.further:
        raise GumihoError("--backend vllm writes one drafter: name one with --ckpt")
    if len(args.backend) > 1:
        raise GumihoError("--backend vllm writes no bundle: export for the other backends in a run of their own")
    dtype = {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    with Progress() as progress:
        progress.start("reading the checkpoints")
        pair = open_pair(args)
        needed = vllm.size(pair, dtype)
        if args.dry_run:
            print(f"Would write '{out}': config.json and model.safetensors, at most {needed / 1e6:.1f} MB.")
            require_place(out, args.overwrite, vllm.is_export)
        require_space(needed, out)
        if args.dry_run:
            return
        with staged(out, args.overwrite, vllm.is_export) as folder:
            progress.start("writing the drafter", needed)
            size = vllm.write(pair, folder, dtype, progress.advance)
    print("\n".join([f"{out}: {size / 1e6:.1f} MB", *vllm.lines(pair, out)]))


def _out(args: argparse.Namespace) -> Path:
    """The folder to write. Raises GumihoError if no folder can have that name."""
    source = Path(args.ckpt or args.target)
    name = source.stem if source.suffix.lower() == ".gguf" else source.name
    out: Path = args.out or Path(f"{name}-{args.backend[0]}")
    try:
        out = out.expanduser()
        unfinished(out).exists()  # the longest of the names that will be used
    except (OSError, RuntimeError) as error:
        text = str(out)
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        reason = getattr(error, "strerror", None) or error
        raise GumihoError(f"'{shown}' cannot be the name of a folder ({reason}): name another one with --out") from None
    return out


def _after_interruption(args: argparse.Namespace) -> str:
    """What an interrupted export leaves, and how to continue."""
    out = _out(args)
    return f"and the same command continues from '{unfinished(out)}'" if resumable(out) else "nothing was written"


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    return run(lambda: _exported(args))


def _exported(args: argparse.Namespace) -> int:
    try:
        with interruptible():
            export(args)
    except ModuleNotFoundError as error:
        raise GumihoError(
            f"exporting needs the package '{error.name}', which the runtime does not install: pip install 'gumiho-export[export]'"
        ) from None
    except KeyboardInterrupt:
        print(f"error: interrupted, {_after_interruption(args)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
