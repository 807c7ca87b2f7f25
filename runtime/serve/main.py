"""Serves a bundle over HTTP with OpenAI's API."""

import argparse
import logging
import os
import socket
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from ..api.loader import load
from ..backends.allocator import share_arena
from ..cli.command import argument_parser, read_text
from ..cli.command import run as run_command
from ..cli.engine_options import add_engine_options
from ..errors import InputError, UnavailableError

if TYPE_CHECKING:
    from .guard import Access

_SWITCH_SECONDS = 0.0002
_KEY = "GUMIHO_API_KEY"
_LONGEST = 1_000_000  # seconds, within what timers of the event loop accept


def parser() -> argparse.ArgumentParser:
    parser = argument_parser("serve", __doc__)
    parser.add_argument("bundle", help="folder made by gumiho-export")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any free one (default: 8000)")
    parser.add_argument(
        "--streams",
        type=int,
        default=4,
        metavar="N",
        help="texts decoded at once, each with caches of its own (default: 4)",
    )
    parser.add_argument(
        "--model-name", default="", metavar="NAME", help="the model's name in requests (default: the bundle's folder)"
    )
    _access_options(parser.add_argument_group("access"))
    _limit_options(parser.add_argument_group("limits"))
    parser.add_argument("--log-prompts", action="store_true", help="log the bodies of requests, and with them prompts")
    add_engine_options(parser)
    return parser


def _access_options(access: argparse._ArgumentGroup) -> None:
    access.add_argument(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"key that requests must have; repeatable; better in a file or in {_KEY}, since others see command lines",
    )
    access.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with such keys, one per line")
    access.add_argument("--no-api-key", action="store_true", help="listen beyond this machine without a key")
    access.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="web pages of this origin may send requests (CORS), * for all; repeatable (default: none)",
    )
    access.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="name of this server in requests, besides its address; repeatable (default: any if a key is required)",
    )


def _limit_options(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--max-tokens",
        type=int,
        default=0,
        metavar="N",
        help="new tokens of a text at most (default: what the capacity leaves)",
    )
    limits.add_argument(
        "--max-prompt", type=int, default=0, metavar="N", help="tokens of a prompt at most (default: the capacity)"
    )
    limits.add_argument(
        "--max-seconds",
        type=float,
        default=600,
        metavar="S",
        help="seconds to decode a text at most, 0 for no limit (default: 600)",
    )
    limits.add_argument(
        "--max-body", type=int, default=8 << 20, metavar="BYTES", help="size of a request (default: 8 MiB)"
    )
    limits.add_argument("--max-choices", type=int, default=16, metavar="N", help="texts of one request (default: 16)")
    limits.add_argument(
        "--queue",
        type=int,
        default=32,
        metavar="N",
        help="texts that may wait for a stream; more are refused with status 429 (default: 32)",
    )
    limits.add_argument(
        "--patience",
        type=float,
        default=30,
        metavar="S",
        help="seconds for a client to send its request, or to read what was sent (default: 30)",
    )
    limits.add_argument(
        "--grace",
        type=int,
        default=30,
        metavar="S",
        help="seconds for running requests to end after SIGTERM (default: 30)",
    )


def _local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _keys(args: argparse.Namespace) -> list[str]:
    """The API keys. Raises InputError if a key is needed and none is given, or if one is empty or does not fit into a
    header."""
    keys = [*args.api_key, *([os.environ[_KEY]] if os.environ.get(_KEY) else [])]
    if args.api_key_file:
        keys += [line for line in read_text(args.api_key_file, "the file of API keys").split("\n") if line.strip()]
    keys = [key.strip() for key in keys]
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise InputError("an API key is empty or has other characters than ASCII's: give another one")
    if args.api_key_file and not keys:
        raise InputError(f"'{args.api_key_file}' has no API key: write one per line")
    if not keys and not args.no_api_key and not _local(args.host):
        raise InputError(
            f"--host {args.host} lets other machines in: give --api-key-file FILE or {_KEY}, or --no-api-key to serve "
            "everybody"
        )
    return keys


def _check(args: argparse.Namespace) -> None:
    for name, least in (
        ("max_tokens", 0),
        ("max_prompt", 0),
        ("max_seconds", 0),
        ("max_body", 1),
        ("max_choices", 1),
        ("queue", 0),
        ("grace", 0),
    ):
        if not getattr(args, name) >= least:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(args, name)}: give {least} or more")
    if not 0 < args.patience <= _LONGEST:
        raise InputError(f"--patience is {args.patience:g}: give more than 0 seconds, and {_LONGEST} at most")
    if args.grace > _LONGEST:
        raise InputError(f"--grace is {args.grace}: give {_LONGEST} seconds at most")
    if not 0 <= args.port < 1 << 16:
        raise InputError(f"--port is {args.port}: give 0 to 65535")


class _Printable(logging.Formatter):
    """Removes control characters, which terminals obey and which clients' texts may bring into tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in super().format(record))


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{host} port {port} cannot be listened on ({reason}): give another --host or --port"
        ) from None


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return run_command(lambda: serve(args))


def _begin_log() -> None:
    logging.raiseExceptions = False  # keep serving even if the log cannot be written
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Printable("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _access(args: argparse.Namespace, keys: Sequence[str]) -> "Access":
    """Who may send requests. keys: see ``_keys``."""
    from .guard import Access

    own = args.host.lower()
    hosts = {"localhost", "127.0.0.1", "[::1]", own, f"[{own}]", *map(str.lower, args.allow_host)}
    checked = args.allow_host or (not keys and _local(args.host))
    return Access(keys, args.allow_origin, sorted(hosts) if checked else None)


def serve(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    _check(args)
    keys = _keys(args)
    try:
        from .app import Limits, Server
        from .http_server import HttpServer
    except ImportError as error:
        raise UnavailableError(f"serving needs {error.name or error}: pip install '.[serve]'") from None
    share_arena()
    # After a pass, the decoding thread waits up to this long for threads that write to clients. Python's default of 5
    # ms would be a third of a pass of a small model.
    sys.setswitchinterval(_SWITCH_SECONDS)
    _begin_log()
    access = _access(args, keys)
    limits = Limits(
        args.max_body, args.max_tokens, args.max_prompt, args.max_seconds, args.queue, args.max_choices, args.patience
    )
    with (
        _listen(args.host, args.port) as listening,
        load(args.bundle, args.backend, args.device, args.threads, args.streams) as model,
    ):
        name = args.model_name or Path(args.bundle).resolve().name
        app = Server(model, name, limits, access, args.log_prompts).app()
        HttpServer(app, name, args.patience, args.grace).run(sockets=[listening])
    return 0
