"""Small checkpoints in the released layouts, made of random numbers."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel


@dataclass
class RandomPair:
    """What to make: a target's config.json fields, and the drafter's layers and heads. Weights are drawn from ``seed``.

    scale multiplies the lm_head, so that the choices of an untrained model are well apart.
    """

    target: dict[str, Any] = field(default_factory=dict)
    layers: int = 2
    heads: int = 2
    fc_bias: bool = True
    seed: int = 0
    scale: float = 8.0

    def config(self) -> PretrainedConfig:
        base = {
            "model_type": "llama",
            "vocab_size": 1009,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "max_position_embeddings": 256,
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
        }
        return AutoConfig.for_model(**{**base, **self.target})

    def make_target(self) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config()).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_(0, 0.1)
                elif "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                elif "embed_tokens" in name:
                    parameter.normal_(0, 1.0)
                elif "lm_head" in name:
                    parameter.normal_(0, self.scale / parameter.shape[1] ** 0.5)
                else:
                    parameter.normal_(0, 1.2 / parameter.shape[1] ** 0.5)
        return model

    def make_drafter(self, target: PreTrainedModel) -> dict[str, Tensor]:
        """Tensors by their official names."""
        config, draw = target.config, torch.Generator().manual_seed(self.seed + 1)
        h, d, ffn = config.hidden_size, head_dim(config), config.intermediate_size

        def matrix(rows: int, columns: int) -> Tensor:
            return torch.randn(rows, columns, generator=draw) * (1.2 / columns**0.5)

        state = {
            "embed_tokens.weight": target.model.embed_tokens.weight.detach().clone(),
            "fc.weight": matrix(h, 2 * h),
        }
        if self.fc_bias:
            state["fc.bias"] = torch.randn(h, generator=draw) * 0.1
        for i in range(self.layers):
            p = f"layers.{i}"
            state[f"{p}.self_attn.q_proj.weight"] = matrix(config.num_attention_heads * d, h)
            state[f"{p}.self_attn.k_proj.weight"] = matrix(config.num_key_value_heads * d, h)
            state[f"{p}.self_attn.v_proj.weight"] = matrix(config.num_key_value_heads * d, h)
            state[f"{p}.self_attn.o_proj.weight"] = matrix(h, config.num_attention_heads * d)
            state[f"{p}.mlp.gate_proj.weight"] = matrix(ffn, h)
            state[f"{p}.mlp.up_proj.weight"] = matrix(ffn, h)
            state[f"{p}.mlp.down_proj.weight"] = matrix(h, ffn)
            for norm in ["post_attention_layernorm"] + ["input_layernorm"] * (i > 0):
                state[f"{p}.{norm}.weight"] = torch.rand(h, generator=draw) + 0.5
        for head in range(self.heads):
            for block in range(6):
                state[f"mlp.{head}.{block}.linear.weight"] = matrix(h, h if block else 2 * h)
                state[f"mlp.{head}.{block}.linear.bias"] = torch.randn(h, generator=draw) * 0.1
        return state

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Writes ``folder/target`` (safetensors) and ``folder/drafter`` (official layout). Returns both."""
        target = self.make_target()
        target.save_pretrained(folder / "target")
        write_drafter(folder / "drafter", self.make_drafter(target), drafter_config(target.config, self.layers))
        return folder / "target", folder / "drafter"


def head_dim(config: PretrainedConfig) -> int:
    """Qwen2's configuration need not say it."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def drafter_config(target: PretrainedConfig, layers: int) -> dict[str, Any]:
    """A drafter's config.json as the official repository spells it (old rotary spelling, ``bias`` wrong on purpose)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "bias": False,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": head_dim(target),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": 2048,
        "rope_theta": target.rope_parameters["rope_theta"],
        "rope_scaling": None,
    }


def write_drafter(folder: Path, state: dict[str, Tensor], config: dict[str, Any], safetensors: bool = False) -> Path:
    """One weight file and a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if safetensors:
        save_file(state, folder / "model.safetensors")
    else:
        torch.save(state, folder / "pytorch_model.bin")
    return folder


SMALL = RandomPair({"vocab_size": 40}, heads=2, seed=5)  # tests that need some bundle share its export
