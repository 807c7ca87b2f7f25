"""Grows a trained pair to a larger Llama shape that computes the same function.

    python tools/grow_pair.py PAIR OUT --hidden 1536 --intermediate 6144 --layers 20 --heads 12 --kv-heads 4 \\
        --head-dim 128 --vocabulary 32000 [--positions 8192] [--dtype fp32]

reads ``PAIR/target`` and ``PAIR/drafter`` and writes ``OUT/target`` and ``OUT/drafter``, in shards of one layer or head
each, so that memory holds little more than the largest tensor. Sizes that are not given do not change. Greedy tokens
are those of the old pair, and so are trees and tau except for near-ties. So a small trained pair gives real acceptance
to benchmarks of real shapes. These parts are added:

- Hidden channels are zero, from the embedding to the target's last norm, whose output the drafter reads. A norm divides
  by the mean square over all channels, so its weight is multiplied by sqrt(H / H') and its epsilon by H / H'.
- Channels of a head: if the head is k times as long, old channel c becomes channel k * c. So the rotary pair i,
  channels i and i + d/2, becomes the pair k * i, with the same frequency theta^(-2ki / kd), scaled by ``rope_scaling``
  as before. Attention divides by sqrt(d'), so queries are multiplied by sqrt(k).
- Heads: an old group of query heads fills one new group or, if the new groups are smaller, several, each with a copy of
  its key-value head. The remaining heads are zero.
- Channels of the MLP are zero.
- Layers follow the old ones. Their norms' weights are zero, so they add zero to the hidden state. Their matrices are
  noise, because an export stores equal tensors once, and a benchmark would then read fewer bytes than the shape has.
- Tokens are copies of an unlikely one in embedding and ``lm_head``: the one whose largest probability is lowest in
  texts of the target (16 samples of 128 tokens at temperature 1). A copy has the same logit as the original, whose
  lower id wins the tie, so greedy decoding never chooses a copy. Their total probability is printed, because sampled
  texts may contain one.

In fp32, the default, results are equal up to rounding, which differs with the order of summation and the factors above.
fp16 needs half the disk space, and rounds norms and queries once more unless H'/H and k are powers of four.
"""

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LlamaForCausalLM

from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.pair import Pair
from exporter.staging import staged
from graphs.layer import LlamaShape
from runtime.cli.command import run
from runtime.errors import InputError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SIZES = {  # attribute of LlamaShape: field of config.json
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocabulary": "vocab_size",
}
COPIED = "*.json", "tokenizer*", "*.jinja"  # tokenizer, generation_config.json
NOISE = 0.02  # standard deviation, Llama's initializer_range


def grown_shape(old: LlamaShape, requested: dict[str, int | None], kind: str) -> LlamaShape:
    """The old shape with the requested sizes. Raises InputError if the old shape does not fit into it."""
    sizes = {name: size for name, size in requested.items() if size is not None}
    for name, size in sizes.items():
        if size < (current := getattr(old, name)):
            raise InputError(f"{_flag(name)} {size} is less than the {kind} has: give {current} or more")
    new = replace(old, **sizes)  # type: ignore[arg-type]
    if new.head_dim % old.head_dim:
        raise InputError(
            f"--head-dim {new.head_dim} is not a multiple of the {kind}'s {old.head_dim}, as its rotary frequencies "
            f"require: give {old.head_dim}, {2 * old.head_dim} or {4 * old.head_dim}"
        )
    if new.heads % new.kv_heads:
        raise InputError(f"--heads {new.heads} cannot share --kv-heads {new.kv_heads} evenly: give a multiple of it")
    if new.hidden % new.heads:
        raise InputError(
            f"--hidden {new.hidden} is not a multiple of --heads {new.heads}, as transformers requires: give one"
        )
    share, required = new.heads // new.kv_heads, old.kv_heads * _copies(old, new)
    if new.kv_heads < required:
        raise InputError(
            f"the {kind}'s {old.kv_heads} groups of {old.heads // old.kv_heads} heads need {required} key-value heads "
            f"of {share} heads each: give --heads {share * required} --kv-heads {required}, or more heads per "
            "key-value head"
        )
    return replace(new, eps=old.eps * old.hidden / new.hidden)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _copies(old: LlamaShape, new: LlamaShape) -> int:
    """The number of new groups of query heads that an old group fills."""
    return -(-(old.heads // old.kv_heads) // (new.heads // new.kv_heads))


def head_sources(old: LlamaShape, new: LlamaShape) -> tuple[Tensor, Tensor]:
    """The old query head of every new one, and the old key-value head, or -1 for added ones. int64 [heads], [kv
    heads]."""
    old_share, share, copies = old.heads // old.kv_heads, new.heads // new.kv_heads, _copies(old, new)
    kv = torch.where((kv := torch.arange(new.kv_heads) // copies) < old.kv_heads, kv, -1)
    head = torch.arange(new.heads)
    group = head // share
    within = group % copies * share + head % share  # index in the old group
    return torch.where((kv[group] >= 0) & (within < old_share), kv[group] * old_share + within, -1), kv


def sources(old: LlamaShape, new: LlamaShape, unlikely: int) -> dict[str, Tensor]:
    """The old channel of every new one, or -1 for an added one, by kind of channel. unlikely: the token to copy."""

    def longer(size: int, count: int) -> Tensor:
        return torch.cat((torch.arange(count), torch.full((size - count,), -1)))

    def spread(heads: Tensor) -> Tensor:
        channel, k = torch.arange(new.head_dim), new.head_dim // old.head_dim
        is_old = (heads[:, None] >= 0) & (channel % k == 0)
        return torch.where(is_old, heads[:, None] * old.head_dim + channel // k, -1).flatten()

    query, key = map(spread, head_sources(old, new))
    hidden, vocabulary = longer(new.hidden, old.hidden), longer(new.vocabulary, old.vocabulary)
    return {
        "hidden": hidden,
        "two": torch.cat((hidden, torch.where(hidden < 0, -1, hidden + old.hidden))),  # two concatenated hidden rows
        "intermediate": longer(new.intermediate, old.intermediate),
        "query": query,
        "key": key,
        "vocabulary": torch.where(vocabulary < 0, unlikely, vocabulary),
    }


class Grown:
    """A checkpoint grown to a larger shape, a tensor at a time.

    new: a result of ``grown_shape``. tied: whether ``lm_head`` is the embedding. noise: generator for the added layers.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        old: LlamaShape,
        new: LlamaShape,
        tied: bool,
        unlikely: int,
        dtype: torch.dtype,
        noise: torch.Generator,
        positions: int | None,
    ) -> None:
        self.checkpoint, self.old, self.new, self.dtype, self.noise = checkpoint, old, new, dtype, noise
        self.longer = {} if positions is None else {"max_position_embeddings": positions}
        self.names = sorted(checkpoint.names() - ({"lm_head.weight"} if tied else set()))
        by = sources(old, new, unlikely)
        self.sides = {  # module -> rows, columns
            "q_proj": (by["query"], by["hidden"]),
            "k_proj": (by["key"], by["hidden"]),
            "v_proj": (by["key"], by["hidden"]),
            "o_proj": (by["hidden"], by["query"]),
            "gate_proj": (by["intermediate"], by["hidden"]),
            "up_proj": (by["intermediate"], by["hidden"]),
            "down_proj": (by["hidden"], by["intermediate"]),
            "embed_tokens": (by["vocabulary"], by["hidden"]),
            "lm_head": (by["vocabulary"], by["hidden"]),
            "fc": (by["hidden"], by["two"]),
            "linear": (by["hidden"], by["hidden"]),
            "first": (by["hidden"], by["two"]),
            "input_layernorm": (by["hidden"],),
            "post_attention_layernorm": (by["hidden"],),
            "norm": (by["hidden"],),
        }

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All tensors, grouped by layer or head."""
        for names in self._groups():
            yield {name: self.tensor(name) for name in names}
        first = [name for name in self.names if name.startswith("layers.0.")]
        for layer in range(self.old.layers, self.new.layers):
            yield {name.replace("layers.0.", f"layers.{layer}."): self.added(name) for name in first}

    def _groups(self) -> list[list[str]]:
        groups = dict[str, list[str]]()
        for name in self.names:
            prefix = re.match(r"(layers|mlp)\.\d+\.", name)
            groups.setdefault(prefix[0] if prefix else name, []).append(name)
        return list(groups.values())

    def _sides(self, name: str) -> tuple[Tensor, ...]:
        """The old row of every new row of a tensor, and for a matrix the old column of every new column."""
        module = "first" if re.fullmatch(r"mlp\.\d+\.0\.linear\.\w+", name) else name.split(".")[-2]
        return self.sides[module][: len(self.checkpoint.shape(name))]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the old checkpoint, grown. Raises InputError if its values are too large for the dtype."""
        values = self.checkpoint.read(name).float()
        if "q_proj" in name:
            values *= math.sqrt(self.new.head_dim / self.old.head_dim)
        elif "norm" in name:
            values *= math.sqrt(self.old.hidden / self.new.hidden)
        values = values.to(self.dtype)
        if not values.isfinite().all():
            raise InputError(
                f"{self.checkpoint.kind}: tensor '{name}' has values too large for {self.dtype}: use --dtype fp32"
            )
        rows, *columns = self._sides(name)
        padded = F.pad(values, (0, 1) * values.ndim)[rows]  # index -1 selects the padding
        return padded[:, columns[0]] if columns else padded

    def added(self, name: str) -> Tensor:
        """A tensor of an added layer. name: the tensor of an old layer with the same shape."""
        shape = [len(side) for side in self._sides(name)]
        if len(shape) == 1:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, generator=self.noise).mul_(NOISE).to(self.dtype)

    def config(self) -> dict[str, Any]:
        """config.json with the new sizes."""
        config = {key: value for key, value in self.checkpoint.config.items() if key not in ("dtype", "torch_dtype")}
        sizes = {key: getattr(self.new, name) for name, key in SIZES.items()}
        changed = {
            **sizes,
            **self.longer,
            "rms_norm_eps": self.new.eps,
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if isinstance(config.get("model"), dict):  # vLLM nests the decoder's configuration
            return {**config, "model": {**config["model"], **changed}}
        return {**config, **changed}

    def write(self, folder: Path) -> tuple[int, int]:
        """Writes a checkpoint folder in the Hugging Face layout. Returns its numbers of parameters and bytes."""
        folder.mkdir()
        prefix = "model." if self.checkpoint.kind == "target" else ""
        places, count = dict[str, str](), 0
        for i, part in enumerate(tqdm(self.parts(), self.checkpoint.kind, unit="shard", disable=None)):
            named = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in part.items()}
            shard = f"model-{i:05}.safetensors"
            try:
                save_file(named, folder / shard, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None  # the library wraps OSError
            places |= dict.fromkeys(named, shard)
            count += sum(tensor.numel() for tensor in part.values())
        size = count * self.dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
        for file in {file for pattern in COPIED for file in self.checkpoint.folder.glob(pattern)}:
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2), "utf-8")
        return count, size


@torch.no_grad()
def unlikely_token(folder: Path) -> tuple[int, float, float]:
    """The token whose largest probability is lowest in sampled texts of the target; that probability, and its mean."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(128, model.config.max_position_embeddings - 1)
    # Without the folder's generation settings, because an end of text or top-k would hide parts of the distribution.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0)
    begin = torch.full((16, 1), model.config.bos_token_id or 0)
    text = model.generate(begin, attention_mask=torch.ones_like(begin))
    probability = torch.cat([model(sample[None]).logits[0].softmax(-1) for sample in text])
    token = int(probability.amax(0).argmin())
    return token, float(probability[:, token].max()), float(probability[:, token].mean())


def grow(
    source: Path, out: Path, requested: dict[str, int | None], dtype: torch.dtype, positions: int | None
) -> list[str]:
    """Writes ``out/target`` and ``out/drafter``, both or neither. Returns lines that describe them.

    requested: sizes by the attributes of LlamaShape; None keeps the old size. positions: of the longest text, None as
    it is. Raises GumihoError if the pair cannot be grown.
    """
    for kind in ("target", "drafter"):
        if not (source / kind).is_dir():
            raise InputError(
                f"'{source}' has no folder '{kind}': name a folder with target/ and drafter/, such as demo"
            )
    if out.exists():
        raise InputError(f"'{out}' exists: name another folder")
    pair = Pair(Checkpoint(str(source / "target"), "target"), Checkpoint(str(source / "drafter"), "drafter"))
    if (kind := "n EAGLE-3" if pair.returns.taps else f" {pair.target_config.architecture.name}") != " Llama":
        raise InputError(f"'{source}' is a{kind}, not a Llama: name another folder")
    target = grown_shape(pair.target_shape, requested, "target")
    drafter = grown_shape(pair.draft_shape, {**requested, "layers": None}, "drafter")
    if positions is not None and positions < pair.target_config.positions:
        raise InputError(
            f"--positions {positions} is less than the target has: give {pair.target_config.positions} or more"
        )
    unlikely, lines, added = 0, list[str](), target.vocabulary - pair.target_shape.vocabulary
    if added:
        unlikely, largest, mean = unlikely_token(pair.target.folder)
        lines.append(
            f"the last {added} tokens are copies of {unlikely}: their total probability is {mean * added:.0e} on "
            f"average, at most {largest * added:.0e}"
        )
    noise = torch.Generator().manual_seed(0)
    shared, tied = (unlikely, dtype, noise, positions), pair.target_config.tie_word_embeddings
    checkpoints = (
        Grown(pair.target, pair.target_shape, target, tied, *shared),
        Grown(pair.drafter, pair.draft_shape, drafter, False, *shared),
    )
    with staged(out, overwrite=False) as folder:
        for grown in checkpoints:
            count, size = grown.write(folder / (kind := grown.checkpoint.kind))
            lines.append(f"{out / kind}: {count / 1e6:.1f} M parameters, {size / 1e9:.3f} GB")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path, help="folder with target/ and drafter/")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="fp32", help="precision of the weights (default: %(default)s)"
    )
    parser.add_argument(
        "--positions", type=int, help="new max_position_embeddings, for times of longer texts (default: unchanged)"
    )
    for name, key in SIZES.items():
        parser.add_argument(_flag(name), type=int, help=f"new {key} (default: unchanged)")
    args = parser.parse_args(argv)

    def work() -> int:
        sizes = {name: getattr(args, name) for name in SIZES}
        print(*grow(args.pair, args.out, sizes, DTYPES[args.dtype], args.positions), sep="\n")
        return 0

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
