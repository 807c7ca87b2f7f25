"""What the tests of ``gumiho train`` train on: the demo target with a chat template, and text."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

import exporter.cli
import runtime
from exporter.training import loop, state, store, target
from exporter.training.batches import Features, batch
from exporter.training.evaluate import Evaluation, Score, Vocabulary, Walk
from exporter.training.model import Drafter
from tests.conftest import DEMO
from tests.pairs import RandomPair

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


def write_small_target(folder: Path) -> Path:
    """Random numbers for the demo pair's tokens: of a step on the demo target itself most is products of its drafter's
    matrices. Its layers add little to the embedding, so that what follows a token is easily learnt."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
    }
    model = RandomPair({**sizes, "vocab_size": 2048, "head_dim": 16}).make_target()
    for layer in model.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.data *= 0.1
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, folder)
    return folder


def write_source(folder: Path, loaded: target.Target) -> store.Text:
    """Text of a file, in records of 96 tokens."""
    made = store.Text(folder, loaded.model.config.vocab_size, loaded.name)
    ids = np.array(loaded.tokenizer.encode(SOURCE.read_text()), np.uint32) | store.ANSWER
    with made.writing():
        made.append([(ids[begin : begin + 96], -1) for begin in range(0, len(ids), 96)])
    return made


def training_of(
    drafter: Drafter,
    loaded: target.Target,
    features: Features,
    steps: int,
    hidden_weight: float = 0.1,
    rate: float = 2e-3,
) -> tuple[loop.Training, Evaluation]:
    """Small steps on the features' text, and their measure on a part of it."""
    llama, text = loaded.model, features.text
    embed, lm_head = llama.model.embed_tokens.weight.detach(), llama.lm_head.weight.detach()
    settings = loop.Settings(steps, 384, 4, rate, 2, 0.8, hidden_weight, 0.5, 0, torch.float32)
    made = loop.Training(drafter, text, features, embed, Vocabulary(lm_head, None), settings)
    return made, Evaluation(text, features, embed, lm_head, texts=2, most=24, rows=(4,))


def before_and_after(training: loop.Training, evaluation: Evaluation) -> tuple[Score, Score]:
    """Scores before the steps that are left, and after them."""
    before = evaluation(training.drafter, training.vocabulary)
    while training.step < training.settings.steps:
        training.advance()
    return before, evaluation(training.averaged(), training.vocabulary)


def taus(
    folder: Path, loaded: target.Target, training: loop.Training, drafter: Drafter, source: Path = DEMO / "target"
) -> tuple[float, float]:
    """The tau of a walk along a text that the target, of that folder, wrote greedily, and that of decoding it with an
    export of the drafter."""
    embed, lm_head = loaded.model.model.embed_tokens.weight, loaded.model.lm_head.weight
    state.write_checkpoint(folder / "drafter", drafter, drafter.state_dict(), training.vocabulary.ids, embed, lm_head)
    sources = ["--ckpt", str(folder / "drafter"), "--target", str(source)]
    assert exporter.cli.main([*sources, "--out", str(folder / "bundle"), "--draft-weights", "none"]) == 0
    llama = loaded.model
    with runtime.load(folder / "bundle") as model:
        prompt = model.encode("import os\n\n\ndef ")
        session = model.generate(prompt, max_new_tokens=40, lookup=False, rows=8)
        list(session)
        ids = [*prompt, *session.ids]
    text = store.Text(folder / "text", llama.config.vocab_size, "x")
    with text.writing():
        text.append([(np.array(ids, np.uint32) | store.ANSWER | store.GREEDY, -1)])
    own = batch(text, Features(None, text, llama.model, drafter.taps), [0], "cpu")
    with torch.no_grad():
        tokens, cycles = Walk(drafter, own, training.embed, training.vocabulary).run(8, len(prompt), len(ids))
    assert tokens == len(ids) - len(prompt) - 1
    return tokens / cycles, session.stats.tau
