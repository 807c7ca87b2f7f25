"""Trains the demo pair, a small Llama target and its Gumiho drafter, on the source code of Python's standard library.

    python -m tools.train_demo OUT [--steps 1000] [--draft-steps 2400]
    python -m tools.train_demo OUT --families eagle eagle3 medusa hydra small
    python -m tools.train_demo OUT --assistant [--steps 250]

Writes ``OUT/target`` (a Hugging Face Llama folder, fp16 safetensors) and ``OUT/text.jsonl``, its training text, and
runs ``gumiho train`` to train ``OUT/drafter`` on both. Existing files are kept. ``--families`` trains ``OUT/FAMILY``
for each of these families instead, on the same text and for as many steps. ``--assistant`` trains ``OUT/assistant``
instead, a Llama with a third of the layers: the draft model of assisted generation in ``tools/bench.py``.
"""

import argparse
import json
import math
import re
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from exporter.training import cli as training

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARY, WINDOW = 2048, 512

TARGET = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=6,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
)


def modules(held_out: bool) -> Iterator[list[str]]:
    """The top-level definitions of each of the standard library's modules; one module in twenty is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"} & set(name.parts):
            continue
        if (zlib.crc32(name.as_posix().encode()) % 20 == 0) != held_out:
            continue
        try:
            text = file.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        found, pending = list[str](), ""
        for block in re.split(r"\n\n+(?=(?:def |class |@|async def ))", text):
            pending += block.strip("\n") + "\n"
            if len(pending) > 200:
                found.append(pending)
                pending = ""
        yield found


def documents(held_out: bool) -> Iterator[str]:
    """Top-level definitions of the standard library, short ones joined."""
    for found in modules(held_out):
        yield from found


def train_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        documents(held_out=False),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def token_stream(tokenizer: Tokenizer, held_out: bool) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(documents(held_out))):
        ids += [*encoding.ids, TARGET.eos_token_id]
    return torch.tensor(ids)


def windows(stream: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Token ids [batch, length] from random positions of the stream."""
    starts = torch.randint(0, len(stream) - length, (batch,), generator=generator)
    return torch.stack([stream[s : s + length] for s in starts.tolist()])


def fit(
    parameters: list[nn.Parameter],
    loss_of: Callable[[int], Tensor],
    steps: int,
    rate: float,
    report: Callable[[Tensor], str],
) -> None:
    """Trains with Muon for matrices and AdamW for the rest, with linear warm-up and cosine decay."""
    matrices = [p for p in parameters if p.ndim == 2 and VOCABULARY not in p.shape]
    others = [p for p in parameters if not (p.ndim == 2 and VOCABULARY not in p.shape)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    started = time.perf_counter()
    for step in range(steps):
        scale = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
            optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if step % 50 == 49 or step == steps - 1:
            print(f"step {step + 1}/{steps}  {time.perf_counter() - started:.0f} s  {report(loss)}", flush=True)


def first_and_last(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A two-layer Llama initialized with the target's first and last layer."""
    model = LlamaForCausalLM(LlamaConfig(**{**TARGET.to_dict(), "num_hidden_layers": 2}))
    model.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, old in zip(model.model.layers, (target.model.layers[0], target.model.layers[-1]), strict=True):
        layer.load_state_dict(old.state_dict())
    return model


def train_target(model: LlamaForCausalLM, stream: Tensor, held_out: Tensor, steps: int) -> LlamaForCausalLM:
    generator = torch.Generator().manual_seed(1)

    def loss_of(step: int) -> Tensor:
        # The last fifth of the steps uses whole contexts, so that later positions are trained too.
        batch, length = (8, 2 * WINDOW) if step >= 0.8 * steps else (16, WINDOW)
        ids = windows(stream, batch, length, generator)
        logits = model(ids[:, :-1]).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    def report(loss: Tensor) -> str:
        ids = windows(held_out, 16, WINDOW, torch.Generator().manual_seed(2))
        with torch.no_grad():
            test = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        return f"loss {loss.item():.3f}  held out {test.item():.3f}"

    fit(list(model.parameters()), loss_of, steps, 3e-3, report)
    # Rounded to fp16, because the drafter must learn from the target as it is written.
    return model.eval().requires_grad_(False).half().float()


def write_target(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    model.half().save_pretrained(folder)
    GenerationConfig(bos_token_id=0, eos_token_id=[1]).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "clean_up_tokenization_spaces": False,
                "model_max_length": TARGET.max_position_embeddings,
            },
            indent=2,
        )
    )


def write_text(file: Path) -> None:
    """Every module's definitions as one record for ``gumiho train --data``."""
    partial = file.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as out:
        for text in modules(held_out=False):
            out.write(json.dumps({"text": "".join(text)}) + "\n")
    partial.rename(file)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument(
        "--steps", type=int, default=1000, help="training steps of the target or the assistant (default: 1000)"
    )
    parser.add_argument("--draft-steps", type=int, default=2400, help="training steps of the drafter (default: 2400)")
    parser.add_argument(
        "--families", nargs="+", default=[], help="train drafters of these families (default: the Gumiho)"
    )
    parser.add_argument("--assistant", action="store_true", help="train only an assistant for the target in OUT")
    args = parser.parse_args()
    folder, text = args.out / "target", args.out / "text.jsonl"
    trained = (folder / "model.safetensors").is_file()
    if args.assistant and not trained:
        parser.error(f"{folder} has no target for the assistant: train it first, without --assistant")
    torch.manual_seed(0)

    if args.assistant or not trained:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if trained else train_tokenizer()
        stream, held_out = token_stream(tokenizer, held_out=False), token_stream(tokenizer, held_out=True)
        print(f"{len(stream)} training tokens, {len(held_out)} held out")
        model = first_and_last(LlamaForCausalLM.from_pretrained(folder)) if trained else LlamaForCausalLM(TARGET)
        target = train_target(model, stream, held_out, args.steps)
        write_target(target, tokenizer, args.out / "assistant" if args.assistant else folder)
    if args.assistant:
        return 0
    if not text.is_file():
        write_text(text)
    common = ["--target", str(folder), "--data", str(text), "--steps", str(args.draft_steps)]
    if not args.families:
        return training.main([*common, "--out", str(args.out / "drafter")])
    work = ["--work", str(args.out / "drafter-training")]  # reuses the texts and hidden states of the Gumiho drafter
    runs = (training.main([*common, *work, "--family", name, "--out", str(args.out / name)]) for name in args.families)
    return next((status for status in runs if status), 0)


if __name__ == "__main__":
    sys.exit(main())
