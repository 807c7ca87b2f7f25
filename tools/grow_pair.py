"""Grows a trained pair to a larger Llama shape that computes the same.

    python tools/grow_pair.py PAIR OUT --hidden 1536 --intermediate 6144 --layers 20 --heads 12 --kv-heads 4 \\
        --head-dim 128 --vocabulary 32000 [--dtype fp32]

reads ``PAIR/target`` and ``PAIR/drafter`` and writes ``OUT/target`` and ``OUT/drafter``, in shards of one layer or head each,
so that memory holds the largest tensor and little else. What is not given stays as it is. Greedy tokens are those of the old
pair, and so are trees and tau but for near-ties: a small pair that was trained gives real acceptance to benchmarks of real
shapes. What is added:

- Hidden channels are zero, from the embedding to the target's last norm, whose output the drafter reads. A norm divides by
  the mean square over all channels, so its weight is multiplied by sqrt(H / H') and its epsilon by H / H'.
- Channels of a head: with a head k times as long, old channel c is channel k * c. So the rotary pair i, channels i and i + d/2,
  becomes the pair k * i, whose frequency theta^(-2ki / kd) is the old one's, scaled by ``rope_scaling`` as before. Attention
  divides by sqrt(d'), so queries are multiplied by sqrt(k).
- Heads: an old group of query heads goes to a group of its own or, where the new groups are smaller, to several, each with a
  copy of its key-value head. The heads left over are zero.
- Channels of the MLP are zero.
- Layers stand behind the old ones. Their norms' weights are zero, so whatever the rest is, they add zero; their matrices are
  noise, since an export stores equal tensors once and a benchmark would read fewer bytes than its shape says.
- Tokens are copies of one that never wins, in embedding and ``lm_head``: the one whose largest probability is lowest over what
  the target itself writes (16 samples of 128 tokens, at temperature 1). A copy has the logit of its original, whose lower id
  wins a tie, so greedy decoding never takes one. Their share of the softmax is printed: drawn texts may hold one.

Zeros are multiplied like other numbers on CPUs; a GPU draws less power over them, so where power bounds its clock it may run
faster than on dense weights.

In fp32, the default, results are the same up to the rounding of other orders of summation and of the factors above. fp16, which
takes half the disk, rounds norms and queries once more, unless H'/H and k are powers of four.
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
from runtime.command import run
from runtime.errors import GumihoError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
SIZES = {  # of a LlamaShape: as config.json has them
    "hidden": "hidden_size", "intermediate": "intermediate_size", "layers": "num_hidden_layers",
    "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim", "vocabulary": "vocab_size",
}  # fmt: skip
BESIDE = "*.json", "tokenizer*", "*.jinja"  # tokenizer, generation_config.json
NOISE = 0.02  # standard deviation, Llama's initializer_range


def grown_shape(old: LlamaShape, wanted: dict[str, int | None], kind: str) -> LlamaShape:
    """The shape that is asked for, or the old one where nothing is. Raises GumihoError where the old one does not fit in."""
    sizes = {name: size for name, size in wanted.items() if size is not None}
    for name, size in sizes.items():
        found = getattr(old, name)
        if size < found:
            raise GumihoError(f"{_flag(name)} {size} is less than the {kind} has: give {found} or more")
    new = replace(old, **sizes)  # type: ignore[arg-type]
    if new.head_dim % old.head_dim:
        raise GumihoError(
            f"--head-dim {new.head_dim} is no multiple of the {kind}'s {old.head_dim}, as its rotary frequencies demand: "
            f"give {old.head_dim}, {2 * old.head_dim} or {4 * old.head_dim}"
        )
    if new.heads % new.kv_heads:
        raise GumihoError(f"--heads {new.heads} cannot share --kv-heads {new.kv_heads} evenly: give a multiple of it")
    if new.hidden % new.heads:
        raise GumihoError(
            f"--hidden {new.hidden} is no multiple of --heads {new.heads}, as transformers demands: give one that is"
        )
    share, needed = new.heads // new.kv_heads, old.kv_heads * _copies(old, new)
    if new.kv_heads < needed:
        raise GumihoError(
            f"the {kind}'s {old.kv_heads} groups of {old.heads // old.kv_heads} heads take {needed} key-value heads "
            f"with {share} heads each: give --heads {share * needed} --kv-heads {needed}, or more heads to each key-value head"
        )
    return replace(new, eps=old.eps * old.hidden / new.hidden)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _copies(old: LlamaShape, new: LlamaShape) -> int:
    """How many new groups of query heads an old group fills."""
    return -(-(old.heads // old.kv_heads) // (new.heads // new.kv_heads))


def head_sources(old: LlamaShape, new: LlamaShape) -> tuple[Tensor, Tensor]:
    """The old query head of every new one, and the old key-value head, or -1. int64 [heads], [kv heads]."""
    old_share, share, copies = old.heads // old.kv_heads, new.heads // new.kv_heads, _copies(old, new)
    kv = torch.arange(new.kv_heads) // copies
    kv = torch.where(kv < old.kv_heads, kv, -1)
    head = torch.arange(new.heads)
    group = head // share
    within = group % copies * share + head % share  # the old group
    return torch.where((kv[group] >= 0) & (within < old_share), kv[group] * old_share + within, -1), kv


def sources(old: LlamaShape, new: LlamaShape, never: int) -> dict[str, Tensor]:
    """The old channel of every new one, or -1 for one that is added, for each kind of channel. never: the token to copy."""

    def longer(size: int, found: int) -> Tensor:
        return torch.cat((torch.arange(found), torch.full((size - found,), -1)))

    def spread(heads: Tensor) -> Tensor:
        channel, k = torch.arange(new.head_dim), new.head_dim // old.head_dim
        kept = (heads[:, None] >= 0) & (channel % k == 0)
        return torch.where(kept, heads[:, None] * old.head_dim + channel // k, -1).flatten()

    query, key = map(spread, head_sources(old, new))
    hidden, vocabulary = longer(new.hidden, old.hidden), longer(new.vocabulary, old.vocabulary)
    return {
        "hidden": hidden,
        "two": torch.cat((hidden, torch.where(hidden < 0, -1, hidden + old.hidden))),  # of fc and heads: concatenated
        "intermediate": longer(new.intermediate, old.intermediate),
        "query": query,
        "key": key,
        "vocabulary": torch.where(vocabulary < 0, never, vocabulary),
    }


class Grown:
    """A checkpoint of a larger shape, made of one of the old shape, a tensor at a time.

    new: its shape, as ``grown_shape`` gives it. tied: whether ``lm_head`` is the embedding. noise: makes added layers.
    """

    def __init__(
        self, checkpoint: Checkpoint, old: LlamaShape, new: LlamaShape, tied: bool, never: int, dtype: torch.dtype,
        noise: torch.Generator,
    ) -> None:  # fmt: skip
        self.checkpoint, self.old, self.new, self.dtype, self.noise = checkpoint, old, new, dtype, noise
        self.names = sorted(checkpoint.names() - ({"lm_head.weight"} if tied else set()))
        by = sources(old, new, never)
        self.sides = {  # module -> rows, columns
            "q_proj": (by["query"], by["hidden"]), "k_proj": (by["key"], by["hidden"]), "v_proj": (by["key"], by["hidden"]),
            "o_proj": (by["hidden"], by["query"]), "gate_proj": (by["intermediate"], by["hidden"]),
            "up_proj": (by["intermediate"], by["hidden"]), "down_proj": (by["hidden"], by["intermediate"]),
            "embed_tokens": (by["vocabulary"], by["hidden"]), "lm_head": (by["vocabulary"], by["hidden"]),
            "fc": (by["hidden"], by["two"]), "linear": (by["hidden"], by["hidden"]), "first": (by["hidden"], by["two"]),
            "input_layernorm": (by["hidden"],), "post_attention_layernorm": (by["hidden"],), "norm": (by["hidden"],),
        }  # fmt: skip

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """All tensors, those of a layer or a head together."""
        for names in self._groups():
            yield {name: self.tensor(name) for name in names}
        first = [name for name in self.names if name.startswith("layers.0.")]
        for layer in range(self.old.layers, self.new.layers):
            yield {name.replace("layers.0.", f"layers.{layer}."): self.added(name) for name in first}

    def _groups(self) -> list[list[str]]:
        groups = dict[str, list[str]]()
        for name in self.names:
            found = re.match(r"(layers|mlp)\.\d+\.", name)
            groups.setdefault(found[0] if found else name, []).append(name)
        return list(groups.values())

    def _sides(self, name: str) -> tuple[Tensor, ...]:
        """The old row of every new row of a tensor and, of a matrix, the old column of every new column."""
        module = "first" if re.fullmatch(r"mlp\.\d+\.0\.linear\.\w+", name) else name.split(".")[-2]
        return self.sides[module][: len(self.checkpoint.shape(name))]

    def tensor(self, name: str) -> Tensor:
        values = self.checkpoint.read(name).float()
        if "q_proj" in name:
            values *= math.sqrt(self.new.head_dim / self.old.head_dim)
        elif "norm" in name:
            values *= math.sqrt(self.old.hidden / self.new.hidden)
        values = values.to(self.dtype)
        if not values.isfinite().all():
            raise GumihoError(f"{self.checkpoint.kind}: tensor '{name}' goes beyond what {self.dtype} holds: use --dtype fp32")
        rows, *columns = self._sides(name)
        padded = F.pad(values, (0, 1) * values.ndim)  # what -1 finds
        return padded[rows][:, columns[0]] if columns else padded[rows]

    def added(self, name: str) -> Tensor:
        """A tensor of an added layer, of the shape that it has in another one."""
        shape = [len(side) for side in self._sides(name)]
        if len(shape) == 1:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.randn(shape, generator=self.noise).mul_(NOISE).to(self.dtype)

    def config(self) -> dict[str, Any]:
        config = {key: value for key, value in self.checkpoint.config.items() if key not in ("dtype", "torch_dtype")}
        sizes = {key: getattr(self.new, name) for name, key in SIZES.items()}
        changed = {**sizes, "rms_norm_eps": self.new.eps, "dtype": str(self.dtype).removeprefix("torch.")}
        if isinstance(config.get("model"), dict):  # vLLM nests the decoder's configuration
            return {**config, "model": {**config["model"], **changed}}
        return {**config, **changed}

    def write(self, folder: Path) -> tuple[int, int]:
        """A checkpoint folder in the Hugging Face layout. Returns its parameters and bytes."""
        folder.mkdir()
        prefix = "model." if self.checkpoint.kind == "target" else ""
        places, count = dict[str, str](), 0
        for i, part in enumerate(tqdm(self.parts(), self.checkpoint.kind, unit="shard", disable=None)):
            named = {name if name == "lm_head.weight" else prefix + name: tensor for name, tensor in part.items()}
            shard = f"model-{i:05}.safetensors"
            try:
                save_file(named, folder / shard, {"format": "pt"})
            except SafetensorError as error:
                raise OSError(str(error)) from None  # which it was before the library wrapped it
            places |= dict.fromkeys(named, shard)
            count += sum(tensor.numel() for tensor in part.values())
        size = count * self.dtype.itemsize
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")
        for file in {file for pattern in BESIDE for file in self.checkpoint.folder.glob(pattern)}:
            if file.name != "config.json" and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        (folder / "config.json").write_text(json.dumps(self.config(), indent=2), "utf-8")
        return count, size


@torch.no_grad()
def never_chosen(folder: Path) -> tuple[int, float, float]:
    """The token whose largest probability is lowest over what the target writes; that probability, and its mean."""
    torch.manual_seed(0)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    length = min(128, model.config.max_position_embeddings - 1)
    # Nothing of the folder's own: an end of text or a top-k would leave parts of the distribution unseen.
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=length, pad_token_id=0)
    begin = torch.full((16, 1), model.config.bos_token_id or 0)
    text = model.generate(begin, attention_mask=torch.ones_like(begin))
    probability = torch.cat([model(one[None]).logits[0].softmax(-1) for one in text])
    token = int(probability.amax(0).argmin())
    return token, float(probability[:, token].max()), float(probability[:, token].mean())


def grow(source: Path, out: Path, wanted: dict[str, int | None], dtype: torch.dtype) -> list[str]:
    """Writes ``out/target`` and ``out/drafter``, both or neither. Returns what is to be said of them.

    wanted: sizes by the names that LlamaShape has for them; None keeps one. Raises GumihoError.
    """
    for kind in ("target", "drafter"):
        if not (source / kind).is_dir():
            raise GumihoError(f"'{source}' has no folder '{kind}': name a folder with a target and a drafter, as demo/ is")
    if out.exists():
        raise GumihoError(f"'{out}' exists: name another folder")
    pair = Pair(Checkpoint(str(source / "target"), "target"), Checkpoint(str(source / "drafter"), "drafter"))
    target = grown_shape(pair.target_shape, wanted, "target")
    drafter = grown_shape(pair.draft_shape, {**wanted, "layers": None}, "drafter")
    never, lines = 0, list[str]()
    added = target.vocabulary - pair.target_shape.vocabulary
    if added:
        never, largest, mean = never_chosen(pair.target.folder)
        lines.append(
            f"the last {added} tokens are copies of {never}: together {mean * added:.0e} likely on average, "
            f"{largest * added:.0e} at most"
        )
    noise = torch.Generator().manual_seed(0)
    tied = pair.target_config.tie_word_embeddings
    made = (
        Grown(pair.target, pair.target_shape, target, tied, never, dtype, noise),
        Grown(pair.drafter, pair.draft_shape, drafter, False, never, dtype, noise),
    )
    with staged(out, overwrite=False) as folder:
        for one in made:
            kind = one.checkpoint.kind
            count, size = one.write(folder / kind)
            lines.append(f"{out / kind}: {count / 1e6:.1f} M parameters, {size / 1e9:.3f} GB")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path, help="folder with target/ and drafter/")
    parser.add_argument("out", type=Path, help="folder to write; must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="precision of the weights (default: %(default)s)")
    for name, key in SIZES.items():
        parser.add_argument(_flag(name), type=int, help=f"new {key} (default: unchanged)")
    args = parser.parse_args(argv)

    def work() -> int:
        print(*grow(args.pair, args.out, {name: getattr(args, name) for name in SIZES}, DTYPES[args.dtype]), sep="\n")
        return 0

    return run(work)


if __name__ == "__main__":
    sys.exit(main())
