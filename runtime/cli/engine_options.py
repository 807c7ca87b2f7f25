"""The options that choose engines, for all commands that run them."""

import argparse

from ..backends import DEVICES, NAMES


def add_engine_options(
    options: "argparse.ArgumentParser | argparse._ArgumentGroup",
    purpose: str = "run",
    bundle: str = "the bundle",
    threads: str = "CPU threads of the engines",
) -> None:
    """Adds ``--backend``, ``--device`` and, unless ``threads`` is "", ``--threads``.

    purpose, bundle, threads: for the help, what the backend is for, whose first backend is the default, and which
    threads are meant.
    """
    options.add_argument(
        "--backend", default="", help=f"backend to {purpose}: {', '.join(NAMES)} (default: {bundle}'s first)"
    )
    options.add_argument("--device", default="", help=DEVICES)
    if threads:
        found = f"{threads} (default: as many as compiling found fastest)"
        options.add_argument("--threads", type=int, default=0, metavar="N", help=found)
