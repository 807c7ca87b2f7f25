"""Trains the demo pair, a small Llama target and its Gumiho drafter, on the source code of Python's standard library.

    python tools/train_demo.py OUT [--steps 1000] [--draft-steps 2400]
    python tools/train_demo.py OUT --assistant [--steps 250]

writes ``OUT/target`` (a Hugging Face Llama folder, fp16 safetensors) and ``OUT/drafter`` (the official Gumiho layout,
``config.json`` and fp16 ``pytorch_model.bin``). If OUT has a target, only its drafter is trained. ``--assistant`` trains
``OUT/assistant`` instead, a Llama with a third of the layers: the draft model of assisted generation in ``tools/bench.py``.

The drafter is trained as in section 3 of the paper: the serial layers learn the target's next hidden state and distribution,
and each head learns them one position further ahead. The loss on the distribution has more weight here, because hidden states
of a small model are far from Gaussian.
"""

import argparse
import json
import math
import re
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
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
VOCABULARY, HEADS, SERIAL_LAYERS, WINDOW = 2048, 5, 2, 512

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


def documents(held_out: bool) -> Iterator[str]:
    """Top-level definitions of the standard library's modules; one module in twenty is held out."""
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
        pending = ""
        for block in re.split(r"\n\n+(?=(?:def |class |@|async def ))", text):
            pending += block.strip("\n") + "\n"
            if len(pending) > 200:
                yield pending
                pending = ""


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
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
                    "clean_up_tokenization_spaces": False, "model_max_length": TARGET.max_position_embeddings}, indent=2)
    )  # fmt: skip


class Drafter(nn.Module):
    """The drafter for training; parameters have the names of the official checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        h = TARGET.hidden_size
        config = LlamaConfig(**{**TARGET.to_dict(), "num_hidden_layers": SERIAL_LAYERS})
        config._attn_implementation = "sdpa"
        self.fc = nn.Linear(2 * h, h)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, i) for i in range(SERIAL_LAYERS)])
        self.layers[0].input_layernorm = nn.Identity()
        self.mlp = nn.ModuleList([nn.ModuleList([Block(2 * h if b == 0 else h, h) for b in range(6)]) for _ in range(HEADS)])
        self.rotary = LlamaRotaryEmbedding(config)

    def serial(self, z: Tensor) -> Tensor:
        positions = torch.arange(z.shape[1])[None]
        rotary = self.rotary(z, positions)
        for layer in self.layers:
            z = layer(z, position_embeddings=rotary, position_ids=positions)
        return z

    def head(self, i: int, x: Tensor) -> Tensor:
        first, *rest = [block.get_submodule("linear") for block in self.mlp[i].children()]
        x = F.silu(first(x))
        for linear in rest:
            x = x + F.silu(linear(x))
        return x


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)


def train_drafter(target: LlamaForCausalLM, stream: Tensor, held_out: Tensor, steps: int) -> Drafter:
    drafter = Drafter()
    # Initialized with the target's last layers, which already work on the features that the serial layers predict.
    for layer, trained in zip(drafter.layers, target.model.layers[-SERIAL_LAYERS:], strict=True):
        layer.load_state_dict(trained.state_dict(), strict=False)
    embed, lm_head = target.model.embed_tokens, target.lm_head
    generator = torch.Generator().manual_seed(3)

    def losses(ids: Tensor) -> tuple[Tensor, list[float]]:
        with torch.no_grad():
            hidden = target.model(ids).last_hidden_state.float()
            teacher = lm_head(hidden).float()
            x = embed(ids).float()
        y = drafter.serial(drafter.fc(torch.cat((x[:, 1:], hidden[:, :-1]), -1)))
        # z(x1, h0) and z(x2, h1) of every position: a drafted token and the hidden state that drafted it.
        z = drafter.fc(torch.cat((x[:, 2:], y[:, :-1]), -1))
        pairs = torch.cat((z[:, :-1], z[:, 1:]), -1)
        # The heads need five times the computation of the serial layers, so they train on a random quarter of the positions.
        sample = torch.randperm(ids.shape[1] - HEADS - 3, generator=generator)[: ids.shape[1] // 4]
        everywhere = torch.arange(ids.shape[1] - 1)
        total, hits = torch.zeros(()), []
        for ahead, positions in [(1, everywhere), *((3 + i, sample) for i in range(HEADS))]:
            out = y if ahead == 1 else drafter.head(ahead - 3, pairs[:, positions])
            logits, expected = lm_head(out).float(), teacher[:, positions + ahead]
            loss = F.kl_div(logits.log_softmax(-1).flatten(0, 1), expected.log_softmax(-1).flatten(0, 1),
                            log_target=True, reduction="batchmean")  # fmt: skip
            loss = loss + 0.1 * F.smooth_l1_loss(out.float(), hidden[:, positions + ahead])
            total = total + loss * (1.0 if ahead == 1 else 0.3)
            hits.append((logits.argmax(-1) == expected.argmax(-1)).float().mean().item())
        return total, hits

    def report(loss: Tensor) -> str:
        with torch.no_grad():
            hits = losses(windows(held_out, 8, WINDOW, torch.Generator().manual_seed(2)))[1]
        return f"loss {loss.item():.3f}  held-out agreement " + " ".join(f"{h:.3f}" for h in hits)

    fit(list(drafter.parameters()), lambda step: losses(windows(stream, 8, WINDOW, generator))[0], steps, 3e-3, report)
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of the target or the assistant (default: 1000)")
    parser.add_argument("--draft-steps", type=int, default=2400, help="training steps of the drafter (default: 2400)")
    parser.add_argument("--assistant", action="store_true", help="train only an assistant for the target in OUT")
    args = parser.parse_args()
    folder = args.out / "target"
    trained = (folder / "model.safetensors").is_file()
    if args.assistant and not trained:
        parser.error(f"{folder} has no target for the assistant: train it first, without --assistant")
    torch.manual_seed(0)

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if args.assistant else train_tokenizer()
    stream, held_out = token_stream(tokenizer, held_out=False), token_stream(tokenizer, held_out=True)
    print(f"{len(stream)} training tokens, {len(held_out)} held out")

    if trained:
        target = LlamaForCausalLM.from_pretrained(folder).eval().requires_grad_(False)
    else:
        target = train_target(LlamaForCausalLM(TARGET), stream, held_out, args.steps)
    if args.assistant:
        write_target(train_target(first_and_last(target), stream, held_out, args.steps), tokenizer, args.out / "assistant")
        return
    write_target(target, tokenizer, folder)
    target = target.float()
    drafter = train_drafter(target, stream, held_out, args.draft_steps)
    folder = args.out / "drafter"
    folder.mkdir(parents=True, exist_ok=True)
    state = {"embed_tokens.weight": target.model.embed_tokens.weight, **drafter.state_dict()}
    torch.save({name: t.detach().half().clone() for name, t in state.items() if "rotary" not in name},
               folder / "pytorch_model.bin")  # fmt: skip
    config = {**TARGET.to_dict(), "num_hidden_layers": SERIAL_LAYERS, "bias": True}
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings", "bias")  # fmt: skip
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "float16",
              "rope_theta": 10000.0, **{k: config[k] for k in keep}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    main()
