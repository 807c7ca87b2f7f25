"""Where a bundle keeps its chat templates and the names of its special tokens: the files that transformers reads."""

import json
from pathlib import Path
from typing import Any

from ...bundle.records import shown
from ...errors import DamageError, InputError, reason, unreadable

TEMPLATES = "additional_chat_templates"  # a folder
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(file, error, "correct it, or copy it again") from None


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises DamageError."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(_read(file))
    except (ValueError, RecursionError) as error:
        raise DamageError(f"{file} is damaged ({reason(error)}): correct it, or copy it again") from None
    if not isinstance(content, dict):
        raise DamageError(f"{file} is damaged (it is not a JSON object): correct it, or copy it again")
    return content


def templates(folder: Path) -> dict[str, tuple[str, str]]:
    """The templates in a folder by name, each with its file. Those in files of their own replace those in the
    configuration. Raises DamageError, and InputError for templates that are no texts."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.name.removesuffix(".jinja"): file for file in sorted((folder / TEMPLATES).glob("*.jinja"))}
    if found := {name: (_read(file), str(file)) for name, file in files.items() if file.is_file()}:
        return found
    source = folder / _CONFIG
    given = _read_json(source).get("chat_template")
    if given is None:
        return {}
    if isinstance(given, list):
        for entry in given:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "template" not in entry:
                raise InputError(
                    f"{source} has {shown(json.dumps(entry))} among its chat templates, expected a name and a "
                    "template: correct it"
                )
        given = {entry["name"]: entry["template"] for entry in given}
    listed = given if isinstance(given, dict) else {"default": given}
    for name, text in listed.items():
        if not isinstance(text, str):
            raise InputError(
                f"{source} has {shown(json.dumps(text))} as its chat template '{shown(name)}', expected a text: "
                "correct it"
            )
    return {name: (text, str(source)) for name, text in listed.items()}


def special_tokens(folder: Path) -> dict[str, str]:
    """Variables such as ``bos_token``. The exporter writes the map, which includes the tokens that transformers adds to
    the configuration.
    """
    named = {
        name: value for name, value in _read_json(folder / _CONFIG).items() if name.endswith("_token")
    } | _read_json(folder / _SPECIAL)
    contents = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}
