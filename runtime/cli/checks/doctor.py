"""Shows which backends can run on this machine, what the others lack, and whether a bundle is intact and its engines
are current.

It compares every byte of the bundle and its engines with the recorded hashes.
"""

import platform
from importlib.metadata import PackageNotFoundError, version

from ...backends import DEVICES, NAMES, Backend, backend
from ...bundle.reader import Bundle
from ...engines import summary
from ...engines.store import find_record
from ...errors import GumihoError
from ..command import argument_parser, run
from .recommendation import recommendation

_PACKAGES = (
    "gumiho-export",
    "numpy",
    "onnxruntime",
    "onnxruntime-gpu",
    "tokenizers",
    "jinja2",
    "cuda-bindings",
    "tensorrt",
    "tensorrt-rtx-cu13-bindings",
)


def installed() -> str:
    """The versions of Python and of the packages that matter here."""
    packages = []
    for package in _PACKAGES:
        try:
            packages.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"Python {platform.python_version()}, {', '.join(packages)}"


def look(name: str, device: str) -> tuple[Backend | None, str]:
    """The backend (None if it cannot run here) and a line about it."""
    try:
        opened = backend(name, device)
        facts = opened.versions() | opened.details()
    except GumihoError as error:
        return None, f"cannot run: {error}"
    return opened, "runs: " + ", ".join(f"{part} {value}" for part, value in facts.items())


def examine(
    bundle: Bundle, available: dict[str, Backend | None], devices: dict[str, str], quick: bool
) -> tuple[list[str], bool]:
    """Lines about a bundle, and whether some backend can run it now. Raises GumihoError if the bundle is damaged.

    available: the backends to look at by name, None if one cannot run here. devices: by backend, "" for the first.
    quick: see ``Bundle.verify``.
    """
    bundle.verify(quick)
    manifest, ready = bundle.manifest, False
    lines = [
        f"bundle {bundle.path}",
        *(f"  {line}" for line in summary.content(bundle)),
        "  the files are as exported "
        f"({'small ones read completely, large ones in samples' if quick else 'every byte read'})",
    ]
    for name in (form for form in manifest.forms if form in available):
        device, costs, notes = available[name], {}, []
        if device is None:
            notes.append("the backend does not run here, so its engines cannot be checked")
        else:
            try:
                notes += summary.memory(bundle, device)
                folder, record = find_record(bundle, device, quick)
                ready = True
                notes.append(f"{folder.relative_to(bundle.path)} is current")
                if not record.proven:
                    notes.append(f"built without a device: run `gumiho compile {bundle.path} --backend {name}`")
                costs = summary.measured(bundle, folder)
                for drafter, own in costs.items():
                    if own and drafter == manifest.each[0]:
                        notes += own.lines(manifest.has_drafter)
                    elif own:
                        notes.append(f"drafter {drafter}: draft {own.draft / 1e6:.3g}, host {own.host / 1e6:.3g}")
            except GumihoError as error:
                notes.append(f"{error}{f' --device {devices[name]}' if devices[name] else ''}")
        lines += [f"  {name}: {line}" for line in (*summary.performance(bundle, name, costs), *notes)]
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
        available = dict[str, Backend | None]()
        devices = {name: args.device if name == args.backend else "" for name in NAMES}
        for name in (args.backend,) if args.backend else NAMES:
            available[name], line = look(name, devices[name])
            print(f"{name}: {line}")
        ready = any(available.values())
        if bundle:
            lines, ready = examine(bundle, available, devices, args.quick)
            print("\n".join(lines))
        if not args.backend:
            print(recommendation(available, bundle))
        return 0 if ready else 1

    return run(work)
