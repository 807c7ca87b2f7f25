"""Random Medusa and Hydra drafters in the layouts in which they are released, and the same ones slow and obvious."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from tests.pairs import RandomPair

MEDUSA_LAYOUTS = ("v0.1", "v1.0", "V2", "vLLM")


@dataclass
class RandomMedusa:
    """tied: whether all heads have the target's lm_head."""

    pair: RandomPair = field(default_factory=lambda: RandomPair(scale=1.0))
    heads: int = 5
    blocks: int = 1
    tied: bool = False
    seed: int = 3

    def state(self) -> dict[str, Tensor]:
        """By v0.1's names. The blocks of a head are one, several times."""
        draw, config = torch.Generator().manual_seed(self.seed), self.pair.config()
        h, vocabulary, state = config.hidden_size, config.vocab_size, dict[str, Tensor]()
        target = self.pair.make_target().lm_head.weight.detach()
        for i in range(self.heads):
            weight, bias = torch.randn(h, h, generator=draw) / h**0.5, 0.1 * torch.randn(h, generator=draw)
            for j in range(self.blocks):
                state |= {f"{i}.{j}.linear.weight": weight.clone(), f"{i}.{j}.linear.bias": bias.clone()}
            own = torch.randn(vocabulary, h, generator=draw) / h**0.5
            state[f"{i}.{self.blocks}.weight"] = target.clone() if self.tied else own
        return state

    def write(self, folder: Path, layout: str = "v0.1") -> list[str]:
        """Returns the options that name drafter and target. Like a released one, config.json says 2 heads."""
        target, state = self.pair.make_target(), self.state()
        target.save_pretrained(folder / "target")
        where = folder / "drafter"
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "somewhere/else"}
        where.mkdir()
        if layout == "v0.1":
            torch.save(state, where / "medusa_lm_head.pt")
        elif layout == "V2":
            state = {name: tensor for name, tensor in state.items() if ".linear." in name}
            save_file(state, where / "medusa_lm_head.safetensors")
        elif layout == "v1.0":
            whole = {name: tensor.detach() for name, tensor in target.state_dict().items()}
            save_file(whole | {f"medusa_head.{name}": t for name, t in state.items()}, where / "model.safetensors")
            config |= json.loads((folder / "target" / "config.json").read_text())
        else:
            renamed = dict[str, Tensor]()
            for name, tensor in state.items():
                i, j, *part = name.split(".")
                renamed[
                    f"medusa_heads.blocks.{i}.layers.{j}.{part[1]}" if part[0] == "linear" else f"lm_heads.{i}.weight"
                ] = tensor
            save_file(renamed, where / "model.safetensors")
        (where / "config.json").write_text(json.dumps(config))
        return ["--ckpt", str(where), "--target", str(where if layout == "v1.0" else folder / "target")]

    def naive(self) -> "NaiveMedusa":
        return NaiveMedusa(self.state(), self.blocks)


class NaiveMedusa:
    """Implements ``naive.Model`` with levels as serial steps: head d reads the last row, whatever the path. A feature
    is the level."""

    def __init__(self, state: dict[str, Tensor], blocks: int) -> None:
        self.state, self.blocks, self.row = state, blocks, torch.zeros(0)

    def read(self, tokens: Sequence[int], hidden: Tensor) -> Self:
        self.row = hidden[-1]
        return self

    def first(self) -> int:
        return 0

    def serial(self, rows: Sequence[tuple[int, int]], depth: Sequence[int]) -> list[int]:
        return [d + 1 for d in depth]

    def head(self, i: int, pair: Any) -> int:
        raise NotImplementedError

    def log_probs(self, feature: int) -> np.ndarray:
        x = self.row
        for j in range(self.blocks):
            x = x + silu(self.state[f"{feature}.{j}.linear.weight"] @ x + self.state[f"{feature}.{j}.linear.bias"])
        return (self.state[f"{feature}.{self.blocks}.weight"] @ x).log_softmax(0).numpy()


@dataclass
class RandomHydra:
    """prefix: whether it is a Hydra++. tied: whether all heads have the target's lm_head, without biases."""

    pair: RandomPair = field(default_factory=lambda: RandomPair(scale=1.0))
    heads: int = 4
    blocks: int = 3
    prefix: bool = False
    tied: bool = False
    seed: int = 4

    def state(self) -> dict[str, Tensor]:
        """By the official names. The blocks of a head behind the first are one, several times."""
        draw, config = torch.Generator().manual_seed(self.seed), self.pair.config()
        h, state = config.hidden_size, dict[str, Tensor]()

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) / columns**0.5

        for i in range(self.heads):
            place = f"hydra_mlp.{i}.{int(self.prefix)}"
            for part in ("linear", "res_connection"):
                state |= {
                    f"{place}.{part}.weight": matrix(h, (i + 2) * h),
                    f"{place}.{part}.bias": 0.1 * matrix(1, h)[0],
                }
            block = {"weight": matrix(h, h), "bias": 0.1 * matrix(1, h)[0]}
            for j in range(self.blocks):
                number = 2 * j + 3 if self.prefix else j + 1
                state |= {f"hydra_mlp.{i}.{number}.linear.{part}": tensor.clone() for part, tensor in block.items()}
            head = f"hydra_lm_head.{i}{'.1' * self.prefix}"
            if self.tied:
                weight, bias = self.pair.make_target().lm_head.weight.detach().clone(), torch.zeros(config.vocab_size)
            else:
                weight, bias = 2 * matrix(config.vocab_size, h), matrix(1, config.vocab_size)[0]
            state |= {f"{head}.weight": weight, f"{head}.bias": bias}
        if self.prefix:
            layer = LlamaDecoderLayer(config, 0)
            for name, parameter in layer.state_dict().items():
                made = (
                    matrix(*parameter.shape)
                    if parameter.dim() == 2
                    else torch.rand(parameter.shape, generator=draw) + 0.5
                )
                state[f"prefix_embeding_layer.layers.0.{name}"] = made
            state["prefix_embeding_layer.norm.weight"] = torch.rand(h, generator=draw) + 0.5
            state["prefix_embeding_layer.embed_tokens.weight"] = torch.zeros(config.vocab_size, h)
            state["input_embed_fn.weight"] = self.pair.make_target().model.embed_tokens.weight.detach().clone()
        return state

    def write(self, folder: Path) -> list[str]:
        """Returns the options that name drafter and target."""
        self.pair.make_target().save_pretrained(folder / "target")
        (folder / "drafter").mkdir()
        torch.save(self.state(), folder / "drafter" / "hydra_lm_head.pt")
        config = {
            "hydra_num_heads": 2,
            "hydra_num_layers": 1,
            "hydra_head_arch": "prefix-mlp" if self.prefix else "mlp",
            "grounded_heads": True,
        }
        (folder / "drafter" / "config.json").write_text(json.dumps(config))
        return ["--ckpt", str(folder / "drafter"), "--target", str(folder / "target")]

    def naive(self) -> "NaiveHydra":
        return NaiveHydra(self)


class NaiveHydra:
    """Implements ``naive.Model``. A feature is a path of tokens."""

    def __init__(self, made: RandomHydra) -> None:
        self.made, self.state = made, made.state()
        self.embedding = made.pair.make_target().model.embed_tokens.weight.detach()
        self.pending, self.row = 0, torch.zeros(0)
        if made.prefix:
            config, start = made.pair.config(), "prefix_embeding_layer."
            config._attn_implementation = "eager"
            self.layer, self.norm = LlamaDecoderLayer(config, 0), LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.rotary = LlamaRotaryEmbedding(config)
            named = {
                n.removeprefix(f"{start}layers.0."): t
                for n, t in self.state.items()
                if n.startswith(f"{start}layers.0.")
            }
            self.layer.load_state_dict(named)
            self.norm.load_state_dict({"weight": self.state[f"{start}norm.weight"]})

    @torch.no_grad()
    def read(self, tokens: Sequence[int], hidden: Tensor) -> Self:
        """The prefix layer reads the rows of all positions anew."""
        self.pending, self.row = tokens[-1], hidden[-1]
        if self.made.prefix:
            n = len(hidden)
            where, mask = torch.arange(n)[None], torch.full((n, n), float("-inf")).triu(1)[None, None]
            x = self.layer(
                hidden[None],
                attention_mask=mask,
                position_ids=where,
                position_embeddings=self.rotary(hidden[None], where),
            )
            self.row = self.norm(x[0] if isinstance(x, tuple) else x)[0, -1]
        return self

    def first(self) -> tuple[int, ...]:
        return ()

    def serial(self, rows: Sequence[tuple[int, tuple[int, ...]]], depth: Sequence[int]) -> list[tuple[int, ...]]:
        return [(*path, token) for token, path in rows]

    def head(self, i: int, pair: Any) -> tuple[int, ...]:
        raise NotImplementedError

    @torch.no_grad()
    def log_probs(self, feature: tuple[int, ...]) -> np.ndarray:
        i, get, prefix = len(feature), self.state.__getitem__, self.made.prefix
        x = torch.cat((self.row, *(self.embedding[token] for token in (self.pending, *feature))))
        wide = f"hydra_mlp.{i}.{int(prefix)}"
        y = linear(x, get(f"{wide}.res_connection.weight"), get(f"{wide}.res_connection.bias"))
        y = y + silu(linear(x, get(f"{wide}.linear.weight"), get(f"{wide}.linear.bias")))
        for j in range(self.made.blocks):
            block = f"hydra_mlp.{i}.{2 * j + 3 if prefix else j + 1}.linear"
            y = y + silu(linear(y, get(f"{block}.weight"), get(f"{block}.bias")))
        head = f"hydra_lm_head.{i}{'.1' * prefix}"
        return linear(y, get(f"{head}.weight"), get(f"{head}.bias")).log_softmax(0).numpy()
