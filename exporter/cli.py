"""``gumiho-export``: a Gumiho checkpoint and its target -> a bundle."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from runtime.command import run
from runtime.errors import GumihoError

from .options import open_pair, parser, plan
from .staging import interruptible, resumable, staged, unfinished
from .summary import describe, forecast, links, quantization, trimmed

if TYPE_CHECKING:
    pass


def export(args: argparse.Namespace) -> None:
    from runtime.backends import backend
    from runtime.bundle.reader import Bundle
    from runtime.engines.memory_check import require
    from runtime.engines.store import compile_engines

    from . import bundle
    from .plan import require_space

    out = _out(args)
    if "vllm" in args.backend:
        export_vllm(args, out)
        return
    if args.device and len(args.backend) > 1:
        raise GumihoError(f"--device {args.device} belongs to one backend: leave it out, or export for that one alone")
    wanted, where = plan(args), f" --device {args.device}" if args.device else ""
    if args.dry_run:
        print(describe(wanted, out))
    require_space(wanted.disk(), out)
    if args.dry_run:
        return
    lines = [*trimmed(wanted), *quantization(wanted), *links(wanted)]
    with staged(out, args.overwrite, same=wanted.same()) as folder:
        manifest = bundle.write(wanted, folder)
        lines += forecast(manifest)
        for name in wanted.backends:
            try:
                made = backend(name, args.device)
                require(Bundle(folder), made, compiling=True)
            except GumihoError as error:
                lines += [
                    f"{name}: not compiled here, since {error}",
                    f"on the device: python -m runtime.compile {out} --backend {name}{where}",
                ]
                continue
            engines, errors = compile_engines(Bundle(folder), made)
            if args.validate:
                from .validate import validate

                errors |= validate(wanted, folder, name, args.device)
            worst = ", ".join(f"{part} {error:.1e}" for part, error in errors.items())
            lines += [
                f"{name}: engines/{engines.name}, largest errors: {worst}",
                f'try: python -m runtime.generate {out} --backend {name}{where} --prompt "..."',
            ]
    size = sum(file.size for file in manifest.files.values())
    print("\n".join([f"{out}: {size / 1e6:.1f} MB", *lines]))


def export_vllm(args: argparse.Namespace, out: Path) -> None:
    """Only the drafter is written: vLLM reads the target as it is."""
    import torch

    from .checkpoints import vllm
    from .plan import require_space

    for option in (
        "validate", "link_weights", "device", "capacity",
        "compat", "rows", "serial_steps", "heads", "top_k", "head_top_k", "beam",
    ):  # fmt: skip
        if getattr(args, option):
            raise GumihoError(
                f"--{option.replace('_', '-')} means nothing to --backend vllm, which grows no tree: leave it out"
            )
    if args.weights or args.draft_weights:
        raise GumihoError(
            "--weights and --draft-weights mean nothing to --backend vllm, which quantizes on its own: leave them out"
        )
    if args.draft_vocab is not None or args.draft_text:
        raise GumihoError(
            "--draft-vocab and --draft-text mean nothing to --backend vllm, whose drafter has a row of lm_head for every token: "
            "leave them out"
        )
    if len(args.backend) > 1:
        raise GumihoError("--backend vllm writes no bundle: export for the other backends in a run of their own")
    pair = open_pair(args)
    dtype = {None: None, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[args.dtype]
    needed = vllm.size(pair, dtype)
    if args.dry_run:
        print(f"writes    {out}: config.json, model.safetensors, {needed / 1e6:.1f} MB at most")
    require_space(needed, out)
    if args.dry_run:
        return
    with staged(out, args.overwrite, vllm.is_export) as folder:
        size = vllm.write(pair, folder, dtype)
    print("\n".join([f"{out}: {size / 1e6:.1f} MB", *vllm.lines(pair, out)]))


def _out(args: argparse.Namespace) -> Path:
    """The folder to write. Raises GumihoError for what no folder can be called."""
    out: Path = args.out or Path(f"{Path(args.ckpt).name}-{args.backend[0]}")
    try:
        out = out.expanduser()
        unfinished(out).exists()  # the longest of the names that are used
    except (OSError, RuntimeError) as error:
        text = str(out)
        name = text if len(text) <= 60 else f"{text[:60]}..."
        said = getattr(error, "strerror", None) or error
        raise GumihoError(f"'{name}' cannot be the name of a folder ({said}): name another one with --out") from None
    return out


def _left(args: argparse.Namespace) -> str:
    """What an interruption leaves."""
    out = _out(args)
    return f"and the same command goes on from '{unfinished(out)}'" if resumable(out) else "nothing was written"


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run(lambda: _exported(args))


def _exported(args: argparse.Namespace) -> int:
    try:
        with interruptible():
            export(args)
    except ModuleNotFoundError as error:
        raise GumihoError(
            f"exporting needs the package '{error.name}', which a device does without: pip install 'gumiho-export[export]'"
        ) from None
    except KeyboardInterrupt:
        print(f"error: interrupted, {_left(args)}", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
