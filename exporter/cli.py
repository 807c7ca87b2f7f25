"""``gumiho-export``: a target, with or without a drafter -> a bundle."""

import sys

from runtime.cli.command import run
from runtime.errors import GumihoError

from .config import ExportConfig
from .options import asked
from .recipe.precision import unrunnable
from .staging import interruptible, resumable, unfinished


def main(argv: list[str] | None = None) -> int:
    config, dry = asked(argv)
    return run(lambda: _export(config, dry))


def _export(config: ExportConfig, dry: bool) -> int:
    try:
        with interruptible():
            if dry:
                _tell(config)
            else:
                _write(config)
    except ModuleNotFoundError as error:
        raise GumihoError(
            f"exporting needs the package '{error.name}', which the runtime does not install: pip install "
            "'gumiho-export[export]'"
        ) from None
    except KeyboardInterrupt:
        print(f"error: interrupted, {_after_interruption(config)}", file=sys.stderr)
        return 130
    return 0


def _tell(config: ExportConfig) -> None:
    from .exporting import dry_run

    dry_run(config)


def _write(config: ExportConfig) -> None:
    from .exporting import exported

    config.check()
    for line in unrunnable(config):
        print(f"note: {line}", file=sys.stderr)
    written = exported(config)
    print(written.report)
    written.require_valid()


def _after_interruption(config: ExportConfig) -> str:
    """What an interrupted export leaves, and how to continue."""
    out = config.folder
    return f"and the same command continues from '{unfinished(out)}'" if resumable(out) else "nothing was written"


if __name__ == "__main__":
    sys.exit(main())
