"""Random EAGLE-3 drafters in the layouts in which they are released."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

from tests.naive import NaiveEagle3
from tests.pairs import RandomPair, drafter_config, head_dim

LAYOUTS = "SafeAILab", "vLLM", "speculators"


@dataclass
class RandomEagle3:
    """A random target (``RandomPair``), and a drafter for it.

    taps: the layers whose inputs it reads. drafted: tokens of the draft vocabulary, None for all, without a ``d2t``.
    hidden: of its layer, None for the target's. layers: of which the others are Llama's own. embedding, own_head:
    whether it has one, and an lm_head. qk_norm, bias: of its queries and keys; biases of all three.
    """

    pair: RandomPair
    taps: tuple[int, ...] = (0, 1, 2)
    drafted: int | None = 200
    hidden: int | None = None
    embedding: bool = True
    qk_norm: bool = False
    bias: bool = False
    fc_bias: bool = False
    normed: bool = False
    layers: int = 1
    own_head: bool = True

    def state(self) -> dict[str, Tensor]:
        """Tensors by SafeAILab's names."""
        config, draw = self.pair.config(), torch.Generator().manual_seed(self.pair.seed + 2)
        h, d, ffn = self.hidden or config.hidden_size, head_dim(config), config.intermediate_size
        heads, kv_heads, vocabulary = config.num_attention_heads, config.num_key_value_heads, config.vocab_size

        def matrix(rows: int, columns: int, size: float = 1.2) -> Tensor:
            return torch.randn(rows, columns, generator=draw) * (size / columns**0.5)

        rows = self.drafted or vocabulary
        state = {"fc.weight": matrix(h, len(self.taps) * config.hidden_size), "lm_head.weight": matrix(rows, h, 4.0)}
        if self.fc_bias:
            state["fc.bias"] = torch.randn(h, generator=draw) * 0.1
        if self.drafted:
            ids = torch.randperm(vocabulary, generator=draw)[: self.drafted]
            ids = ids if self.drafted == vocabulary else ids.sort().values
            state["d2t"] = ids - torch.arange(self.drafted)
            state["t2d"] = torch.isin(torch.arange(vocabulary), ids)
        if self.embedding:
            state["embed_tokens.weight"] = torch.randn(vocabulary, h, generator=draw)
        sizes = {
            "self_attn.q": (heads * d, 2 * h),
            "self_attn.k": (kv_heads * d, 2 * h),
            "self_attn.v": (kv_heads * d, 2 * h),
            "self_attn.o": (h, heads * d),
            "mlp.gate": (ffn, h),
            "mlp.up": (ffn, h),
            "mlp.down": (h, ffn),
        }
        state |= {f"midlayer.{name}_proj.weight": matrix(*size) for name, size in sizes.items()}
        for part in "qkv" if self.bias else "":
            state[f"midlayer.self_attn.{part}_proj.bias"] = torch.randn(sizes[f"self_attn.{part}"][0], generator=draw)
        norms = [f"midlayer.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
        for name in ("norm", *norms):
            state[f"{name}.weight"] = torch.rand(h, generator=draw) + 0.5
        for i in range(1, self.layers):  # Llama's own
            state |= {
                f"layers.{i}.{n}_proj.weight": matrix(r, c // 2 if n[-1] in "qkv" and "attn" in n else c)
                for n, (r, c) in sizes.items()
            }
            state |= {
                f"layers.{i}.{name}.weight": torch.rand(h, generator=draw) + 0.5
                for name in ("input_layernorm", "post_attention_layernorm")
            }
        for part in "qk" if self.qk_norm else "":
            state[f"midlayer.self_attn.{part}_norm.weight"] = torch.rand(d, generator=draw) + 0.5
        return state

    def config(self) -> dict[str, Any]:
        """Of SafeAILab's layout. Like some of theirs, it does not say that queries, keys and values have biases."""
        made = drafter_config(self.pair.config(), 1) | {
            "tie_word_embeddings": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.taps)},
        }
        made |= {"hidden_size": self.hidden} if self.hidden else {}
        return made | ({"draft_vocab_size": self.drafted} if self.drafted else {})

    def write(self, folder: Path, layout: str = "SafeAILab") -> list[str]:
        """Writes target and drafter. Returns the options that name them."""
        self.pair.make_target().save_pretrained(folder / "target")
        where, state, config = folder / "drafter", self.state(), self.config()
        where.mkdir()
        if not self.own_head:
            del state["lm_head.weight"]
        if layout == "SafeAILab":
            torch.save(state, where / "pytorch_model.bin")
        else:
            state = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in state.items()}
            if layout == "vLLM":
                state = {
                    f"model.{n}".replace("model.d2t", "draft_id_to_target_id").replace("model.lm_head", "lm_head"): t
                    for n, t in state.items()
                }
            else:
                taps = config.pop("eagle_config")
                nested = {name: config.pop(name) for name in list(config) if name != "draft_vocab_size"}
                config |= {"transformer_layer_config": nested, "norm_before_residual": self.normed, **taps}
            save_file({name: tensor.contiguous() for name, tensor in state.items()}, where / "model.safetensors")
        if self.normed:
            config["norm_before_residual"] = True
        (where / "config.json").write_text(json.dumps(config))
        return ["--ckpt", str(where), "--target", str(folder / "target")]

    def naive(self) -> NaiveEagle3:
        """The same drafter, slow and obvious."""
        state, fields = self.state(), self.config()
        known = {k: v for k, v in fields.items() if k not in ("architectures", "model_type", "bias", "eagle_config")}
        if not self.embedding:
            state["embed_tokens.weight"] = self.pair.make_target().model.embed_tokens.weight.detach()
        if not self.own_head:
            state["lm_head.weight"] = self.pair.make_target().lm_head.weight.detach()
        made = NaiveEagle3(state, LlamaConfig(**known), self.normed)
        made.ids = torch.arange(len(state["lm_head.weight"])) + state.get("d2t", 0)
        return made
