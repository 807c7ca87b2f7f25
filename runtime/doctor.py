"""Shows which backends can run on this machine, what the others lack, and whether a bundle is intact and its engines are current.

It compares every byte of the bundle and its engines with the recorded hashes.
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

from .backends import DEVICES, NAMES, Backend, backend
from .backends.memory import size
from .bundle.reader import Bundle
from .command import argument_parser, run
from .decoding.prices import Costs
from .engines.store import find_engines
from .errors import GumihoError

_PACKAGES = ("gumiho-export", "numpy", "onnxruntime", "onnxruntime-gpu", "tokenizers", "jinja2", "cuda-bindings", "tensorrt")


def installed() -> str:
    found = []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, {', '.join(found)}"


def look(name: str, device: str) -> tuple[Backend | None, str]:
    """A backend if it can run here, and a line about it."""
    try:
        made = backend(name, device)
        facts = made.versions() | made.details()
    except GumihoError as error:
        return None, f"cannot run: {error}"
    return made, "runs: " + ", ".join(f"{part} {value}" for part, value in facts.items())


def traffic(bundle: Bundle, name: str) -> str:
    """What a cycle reads, and what that leaves for speculation to gain where reading weights is what a pass costs."""
    graphs, depth = bundle.manifest.form(name).graphs, bundle.manifest.depth
    target, draft = graphs["target"].reads, graphs["draft"].reads
    share = 1 + draft / target
    return (
        f"a plain pass reads {size(target)} of weights and a cycle {size(target + draft)}, {share:.2f} times as much: "
        f"where reading is what a pass costs, speculation gains tau / {share:.2f}, {(depth + 1) / share:.1f} at most"
    )


def examine(bundle: Bundle, found: dict[str, Backend | None], devices: dict[str, str], quick: bool) -> tuple[list[str], bool]:
    """Lines about a bundle, and whether it can be run on some backend as it is. Raises GumihoError where it is damaged."""
    bundle.verify(quick)
    manifest, ready = bundle.manifest, False
    lines = [
        f"bundle {bundle.path}",
        f"  {manifest.dtype}, {manifest.rows} rows, {manifest.capacity} positions, made for {', '.join(manifest.forms)}",
        f"  {len(manifest.files)} files are what was exported ({'small ones whole, large ones in samples' if quick else 'every byte read'})",
    ]
    for name in manifest.forms:
        lines.append(f"  {name}: {traffic(bundle, name)}")
        made = found[name]
        if made is None:
            lines.append(f"  {name}: engines cannot be looked for, since the backend does not run here")
            continue
        try:
            folder = find_engines(bundle, made, quick)
            ready = True
            lines.append(f"  {name}: {folder.relative_to(bundle.path)} is current")
            if costs := Costs.read(folder, manifest.rows):
                lines += [f"  {name}: {line}" for line in costs.lines()]
        except GumihoError as error:
            lines.append(f"  {name}: {error}{f' --device {devices[name]}' if devices[name] else ''}")
    return lines, ready


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser("doctor", __doc__)
    parser.add_argument("bundle", nargs="?", help="folder made by gumiho-export (default: check only the backends)")
    parser.add_argument("--backend", choices=NAMES, help="check only this backend (default: all)")
    parser.add_argument("--device", default="", help=f"with --backend: {DEVICES}")
    parser.add_argument("--quick", action="store_true", help="check only samples of large files instead of every byte")
    args = parser.parse_args(argv)

    def work() -> int:
        if args.device and not args.backend:
            raise GumihoError("--device belongs to a backend: name it with --backend")
        bundle = Bundle(args.bundle) if args.bundle else None
        if bundle and args.backend:
            bundle.manifest.form(args.backend)
        print(installed())
        found: dict[str, Backend | None] = dict.fromkeys(NAMES)
        devices = {name: args.device if name == args.backend else "" for name in NAMES}
        for name in (args.backend,) if args.backend else NAMES:
            found[name], line = look(name, devices[name])
            print(f"{name}: {line}")
        ready = any(found.values())
        if bundle:
            lines, ready = examine(bundle, found, devices, args.quick)
            print("\n".join(lines))
        return 0 if ready else 1

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
