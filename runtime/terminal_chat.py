"""``python -m runtime.generate BUNDLE --chat``: a conversation over standard input, its history kept in the caches."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from .decoding.settings import Settings
from .decoding.stats import Stats
from .errors import GumihoError
from .model import Model

_HELP = "/new forgets the conversation, /exit ends it, as the end of input does; Ctrl-C ends an answer"


def _lines() -> Iterator[str]:
    """What is typed, or piped in, a message a line."""
    if sys.stdin is None:
        raise GumihoError("there is no standard input to read messages from: give --prompt")
    asking = sys.stdin.isatty()
    while True:
        try:
            if asking:
                print("> ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise GumihoError(f"the message cannot be read ({error}): give UTF-8 text") from None
        if not line:
            return
        if line.strip():
            yield line.strip()


def opening(system: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [{"role": "system", "content": system}] if system else []


def converse(model: Model, asked: Settings, system: str | None, describe: Callable[[Stats], str] | None) -> int:
    """Answers every message with all before it in mind. Returns the exit status."""
    begun = opening(system)
    messages, session, status = list(begun), model.session(), 0
    model.chat(
        [*begun, {"role": "user", "content": ""}]
    )  # says at once where there is no template, or none for a system's words
    if sys.stdin and sys.stdin.isatty():
        print(_HELP, file=sys.stderr)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/new":
            messages = list(begun)
            continue
        messages.append({"role": "user", "content": line})
        try:
            turn, text = session.start(model.chat(messages), asked), ""
            with suppress(KeyboardInterrupt):  # ends the answer
                for piece in turn:
                    text += piece
                    print(piece, end="", flush=True)
        except GumihoError as error:
            messages.pop()
            status = 1
            print(f"error: {error} (/new begins again)", file=sys.stderr)
            continue
        print(flush=True)
        messages.append({"role": "assistant", "content": text})
        if describe:
            print(describe(turn.stats), file=sys.stderr)
    return status
