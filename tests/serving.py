"""A server in this process, on a port of its own."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI

from runtime import Model
from runtime.serve.app import Limits, Server
from runtime.serve.guard import Access
from runtime.serve.http_server import HttpServer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>{{ style }}{{ reasoning_effort }}{{ "
    "messages[-1].mood }}"
)


@contextmanager
def served(model: Model, limits: Limits | None = None, access: Access | None = None, **options: Any) -> Iterator[str]:
    """The server's address."""
    limits = limits or Limits()
    app = Server(model, "demo", limits, access or Access(), **options).app()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = HttpServer(app, "demo", limits.patience, grace=5)
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive()
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def client(address: str, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def logged(name: str = "gumiho.serve") -> Iterator[list[str]]:
    """The lines of the server's log."""
    lines: list[str] = []
    handler, log = logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
