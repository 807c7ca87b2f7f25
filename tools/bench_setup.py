"""The setup of a benchmark: prompts, environments of the peers, a description of the machine."""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from safetensors import safe_open
from tokenizers import Tokenizer

from runtime.bundle.hashes import file_hash
from runtime.bundle.reader import Bundle
from runtime.decoding.text.chat_template import ChatTemplate
from runtime.errors import InputError
from tools import measure
from tools.parity import read
from tools.peers.protocol import PeerError
from tools.report import of_length

ROOT = Path(__file__).parent.parent
TUNING = 2  # prompts for choosing settings


@dataclass(frozen=True)
class Prompt:
    set: str
    number: int
    ids: list[int]


def environment(peer: str, module: ModuleType, folder: Path) -> Path:
    """The Python of a virtual environment with a peer's packages, and what it builds of their sources. Installs them if
    needed. Raises PeerError if that fails."""
    requirements: Sequence[Sequence[str]] = module.REQUIREMENTS
    pinned = [*map(list, requirements), *([module.SOURCES] if hasattr(module, "SOURCES") else [])]
    if not requirements:
        return Path(sys.executable)
    home = folder.resolve() / peer
    done, python = home / "requirements.json", home / "bin/python"
    if done.is_file() and json.loads(done.read_text()) == pinned:
        return python
    print(f"{peer}: installing {', '.join(name for packages in requirements for name in packages)}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    try:
        for command in ([sys.executable, "-m", "venv", str(home)], *([*pip, *packages] for packages in requirements)):
            subprocess.run(command, capture_output=True, text=True, check=True)
        if hasattr(module, "build"):
            module.build(python)
    except subprocess.CalledProcessError as error:
        lines = [line for line in f"{error.stdout}{error.stderr}".splitlines() if "error" in line.lower()]
        reason = (lines or ["no reason given"])[-1].strip()[:200]
        raise PeerError(f"installing {peer} failed: {reason}") from None
    done.write_text(json.dumps(pinned))
    return python


@cache
def digest(checkpoint: Path) -> str:
    """The folder name for models converted from a checkpoint; it depends on the weights."""
    files = [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]
    whole = hashlib.sha256("".join(map(file_hash, files)).encode()).hexdigest()
    return f"{checkpoint.resolve().parent.name}-{checkpoint.name}-{whole[:8]}"


def described(checkpoint: Path) -> str:
    """Digest and number of parameters of a checkpoint."""
    count = 0
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, "numpy") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118  not a dict
    return f"{digest(checkpoint)}, {count / 1e6:.1f} M parameters"


def machine() -> str:
    """Processor, cores and memory of this machine."""
    return (
        f"{measure.processor()}, {os.cpu_count()} cores, "
        f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    )


def tokenized(args: argparse.Namespace) -> tuple[list[Prompt], list[Prompt], int]:
    """The prompts, the prompts for choosing settings, and the number of prompts that were shortened to fit.

    Chat questions that do not fit are left out. Shortening them would cut off the beginning of the answer. Raises
    InputError if there are no prompts, or no tokenizer or chat template.
    """
    file = args.pair / "target/tokenizer.json"
    if not file.is_file():
        raise InputError(f"{args.pair} has no target/tokenizer.json: give --pair a folder with target/ and drafter/")
    tokenizer = Tokenizer.from_file(str(file))
    context = json.loads((args.pair / "target/config.json").read_text("utf-8"))["max_position_embeddings"]
    room = min(context, *(Bundle(path).manifest.capacity for path in args.bundles), context) - args.new_tokens
    room = min(room, args.longest or room)
    if room < 1:
        raise InputError(
            f"--new-tokens {args.new_tokens} leaves no room for a prompt: give less than {room + args.new_tokens}"
        )
    per_file, template = args.count + TUNING, ChatTemplate.of(file.parent) if args.chat else None
    if args.chat and template is None:
        raise InputError(f"{args.pair}/target has no chat template: leave out --chat")

    def encoded(text: str) -> list[int]:
        asked = template.render([{"role": "user", "content": text}]) if template else text
        ids: list[int] = tokenizer.encode(asked, add_special_tokens=template is None).ids
        return ids

    sets = {file.stem: read(file) for file in args.prompts} or {"held-out": measure.prompts(per_file)}
    if args.contexts:
        whole = [token for texts in sets.values() for text in texts for token in encoded(text)]
        return *_of_lengths(whole, args.contexts, per_file, room), 0
    prompts, spare, cut = list[Prompt](), list[Prompt](), 0
    for name, texts in sets.items():
        found: list[Prompt] = []
        for number, text in enumerate(texts):
            ids = encoded(text)
            if len(ids) <= room or not args.chat:
                found.append(Prompt(name, number, ids[:room]))
                cut += len(ids) > room
            if len(found) == per_file:
                break
        if not found:
            raise InputError(f"{name} holds no prompts that fit: give another file with --prompts")
        prompts += found[: args.count]
        spare += found[-TUNING:]
    return prompts, spare[:TUNING], cut


def _of_lengths(
    text: Sequence[int], lengths: Sequence[int], count: int, room: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Pieces of a text, ``count`` of each length, and the shortest remaining ones for choosing settings."""
    prompts, spare = list[Prompt](), list[Prompt]()
    for length in sorted(set(lengths)):
        if length > room:
            raise InputError(f"--contexts {length} is more than fits before the new tokens: give at most {room}")
        if length * count > len(text):
            raise InputError(
                f"--contexts {length} needs {length * count:,} tokens of text for {count - TUNING} prompts and "
                f"{TUNING} to choose settings, and the files have {len(text):,}: give more of them with --prompts, or "
                "a smaller --count"
            )
        pieces = [Prompt(of_length(length), i, list(text[i * length : (i + 1) * length])) for i in range(count)]
        prompts += pieces[:-TUNING]
        spare += pieces[-TUNING:]
    return prompts, spare[:TUNING]


def about(args: argparse.Namespace, cut: int) -> dict[str, Any]:
    """Facts about the run for the report: machine, models and options. cut: number of shortened prompts."""
    facts = {
        "machine": machine(),
        "threads": args.threads,
        "new tokens": args.new_tokens,
        "rounds": args.rounds,
        "target": described(args.pair / "target"),
    }
    if args.draft_model:
        facts["draft model"] = described(args.draft_model)
    for bundle in args.bundles:
        manifest = Bundle(bundle).manifest
        quantized = ", ".join(f"{name} {weights}" for name, weights in manifest.weights.items())
        facts[f"bundle {bundle.name}"] = f"R {manifest.rows}, {manifest.dtype}" + (
            f"; {quantized}" if quantized else ""
        )
    if cut:
        facts["prompts cut to fit"] = cut
    return facts
