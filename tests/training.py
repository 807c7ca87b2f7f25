"""What the tests of ``gumiho train`` train on: the demo target with a chat template, and text."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from exporter.training import store, target
from exporter.training.evaluate import Score
from tests.conftest import DEMO

SOURCE = Path(shlex.__file__)  # a file of our own would change what the tests train on with every edit
SMALL = ["--window", "96", "--batch", "192", "--anchors", "64", "--warmup", "2", "--threads", "1", "--dtype", "fp32"]


def not_evaluated(*_: Any) -> Score:
    """Takes the place of ``Evaluation.__call__`` where nothing depends on a score."""
    return Score([0.0], [0.0], {})


def write_chat_target(folder: Path) -> Path:
    shutil.copytree(DEMO / "target", folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|begin_of_text|>' + m.role + '\n' + m.content + '<|end_of_text|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|begin_of_text|>assistant\n' }}{% endif %}"
    )
    return folder


def write_source(folder: Path, loaded: target.Target) -> store.Text:
    """Text of a file, in records of 96 tokens."""
    made = store.Text(folder, loaded.model.config.vocab_size, loaded.name)
    ids = np.array(loaded.tokenizer.encode(SOURCE.read_text()), np.uint32) | store.ANSWER
    with made.writing():
        made.append([(ids[begin : begin + 96], -1) for begin in range(0, len(ids), 96)])
    return made
