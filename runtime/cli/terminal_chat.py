"""A chat in the terminal. Messages come from standard input, and the KV caches keep the conversation."""

import io
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..api.model import Model
from ..bundle.files import replaced
from ..decoding.settings import Settings
from ..decoding.stats import Stats
from ..errors import GumihoError, InputError, reason
from .stats_table import table

_QUOTES = '"""'  # enclose a message of several lines


class _Input:
    """Messages and commands from standard input.

    terminal: whether standard input is a terminal.
    """

    def __init__(self) -> None:
        """Raises InputError if there is no standard input."""
        if sys.stdin is None:
            raise InputError("there is no standard input to read messages from: give --prompt")
        # In every locale, so that a message that is not UTF-8 is refused like other wrong messages.
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")
        self.terminal = sys.stdin.isatty()
        self._edited = self.terminal and sys.stdout is not None and sys.stdout.isatty()
        if self._edited:
            with suppress(ImportError):  # some systems lack it; ``input`` uses it for editing and history
                import readline

                # Python turns it off, and every pasted line would be a message.
                readline.parse_and_bind("set enable-bracketed-paste on")

    def read(self) -> tuple[str, bool] | None:
        """The next message or command without surrounding blanks, and whether it can be a command (a text of several
        lines cannot). None at the end of input.

        Bytes that are not UTF-8 become lone surrogates, which tokenizers refuse.
        """
        while (line := self._line("> ")) is not None:
            text = line.strip()
            if text.startswith(_QUOTES):
                text = text.removeprefix(_QUOTES)
                while not text.endswith(_QUOTES) and (line := self._line("... ")) is not None:
                    text += "\n" + line.rstrip()
                return text.removesuffix(_QUOTES).strip(), False
            if text:
                return text, "\n" not in text
        return None

    def _line(self, prompt: str) -> str | None:
        """The next line, or several if they were pasted; None at the end."""
        try:
            if self._edited:
                return input(prompt)
            if self.terminal:
                print(prompt, end="", file=sys.stderr, flush=True)
            return sys.stdin.readline() or None
        except EOFError:
            return None


def opening(system: str | None) -> list[dict[str, str]]:
    """The messages that a conversation begins with."""
    return [{"role": "system", "content": system}] if system else []


class TerminalChat:
    """A conversation; every answer is based on all messages before it.

    messages: all messages so far; the first is the system's if there is one. status: the exit status, 1 once a message
    could not be answered.
    """

    def __init__(
        self, model: Model, settings: Settings, system: str | None, stats: bool, special_tokens: bool = False
    ) -> None:
        """stats: whether to print statistics after each answer. special_tokens: see ``Model.chat``.

        Raises GumihoError if the target has no chat template, or one that refuses a system message.
        """
        self._model, self._settings, self._always, self._special_tokens = model, settings, stats, special_tokens
        self._session, self._last = model.session(), Stats()
        self.messages, self.status, self._ended = opening(system), 0, False
        self._encoded([*self.messages, {"role": "user", "content": ""}])

    def run(self) -> int:
        """Reads messages and commands until the end of input or /exit. Returns the exit status."""
        given = _Input()
        if given.terminal:
            print(
                f"/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves; {_QUOTES} begins and ends several "
                "lines",
                file=sys.stderr,
            )
        while not self._ended:
            try:
                if (found := given.read()) is None:
                    break
                text, command = found
                if command and text.startswith("/") and not text.startswith("//"):
                    self._command(*text.split(maxsplit=1))
                elif text:
                    self._answer(
                        [*self.messages, {"role": "user", "content": text.removeprefix("/") if command else text}]
                    )
            except KeyboardInterrupt:
                if not given.terminal:
                    raise
                print("\nCtrl-D or /exit leaves", file=sys.stderr)
        return self.status

    def _answer(self, messages: list[dict[str, str]]) -> None:
        """Prints the answer to the last message and adds both to the conversation, or neither if there is an error."""
        text = ""
        try:
            turn = self._session.start(self._encoded(messages), self._settings)
            with suppress(KeyboardInterrupt):  # stops the answer, which is kept
                for piece in turn:
                    text += piece
                    print(piece, end="", flush=True)
        except GumihoError as error:
            self.status = 1
            print(f"error: {error} (/new starts a new conversation)", file=sys.stderr)
            return
        self.messages, self._last = [*messages, {"role": "assistant", "content": text}], turn.stats
        print(flush=True)
        if self._always:
            self.stats()

    def _encoded(self, messages: list[dict[str, str]]) -> list[int]:
        return self._model.chat(messages, special_tokens=self._special_tokens)

    def _command(self, name: str, argument: str = "") -> None:
        command = _COMMANDS.get(name)
        if command is None:
            self._refuse(f"there is no command '{name}': /help lists them, and // begins a message that starts with /")
        elif bool(argument) != bool(command[1]):
            self._refuse(f"{name} {'needs ' + command[1] if command[1] else 'takes nothing after it'}")
        else:
            command[0](self, *([argument] if argument else []))

    def _refuse(self, reason: str) -> None:
        print(f"error: {GumihoError(reason)}", file=sys.stderr)

    def help(self) -> None:
        for name, (_, argument, text) in _COMMANDS.items():
            print(f"{f'{name} {argument}'.strip():<16} {text}", file=sys.stderr)

    def new(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def system(self, text: str) -> None:
        messages = [*opening(text), *(message for message in self.messages if message["role"] != "system")]
        try:
            self._encoded([*messages, {"role": "user", "content": ""}])
        except GumihoError as error:
            self._refuse(str(error))
        else:
            self.messages = messages

    def regenerate(self) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._refuse("there is no answer to replace yet")
        else:
            self._answer(self.messages[:-1])

    def save(self, file: str) -> None:
        try:
            path = Path(file).expanduser()
            if os.path.lexists(path):
                raise InputError(f"'{file}' exists already: name another file")
            with replaced(path) as out:
                out.write(json.dumps(self.messages, ensure_ascii=False, indent=1).encode())
        except GumihoError as error:
            self._refuse(str(error))
        except RuntimeError as error:  # an unknown user's home
            self._refuse(f"'{file}' cannot be written ({reason(error)}): name another file")

    def exit(self) -> None:
        self._ended = True

    def stats(self) -> None:
        print(table(self._last), file=sys.stderr)


# Name -> method, argument, line of help.
_COMMANDS: dict[str, tuple[Callable[..., None], str, str]] = {
    "/help": (TerminalChat.help, "", "list these commands"),
    "/new": (TerminalChat.new, "", "forget the conversation, but not the system message"),
    "/system": (TerminalChat.system, "TEXT", "replace the system message"),
    "/regenerate": (TerminalChat.regenerate, "", "replace the last answer with another one"),
    "/save": (TerminalChat.save, "FILE", "write the conversation as JSON"),
    "/stats": (TerminalChat.stats, "", "show the statistics of the last answer"),
    "/exit": (TerminalChat.exit, "", "leave (so does the end of input)"),
}
