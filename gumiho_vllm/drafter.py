"""Gumiho as vLLM's V1 model runner drafts with it (read against vLLM 0.32.0).

The serial layers are an EAGLE of two layers over vLLM's own paged KV cache; its first two steps are theirs. The heads
then draft the other tokens of the chain from the rows of both steps (arXiv 2503.10135, 3.2).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.platforms import current_platform
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.transformers_utils.configs.eagle import EAGLEConfig
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.worker import gpu_model_runner

from . import RESIDUAL_BLOCKS, SERIAL_STEPS

ARCHITECTURE = "GumihoLlamaForCausalLM"


class GumihoConfig(EAGLEConfig):
    """config.json as ``exporter.checkpoints.vllm`` writes it."""

    model_type = "gumiho"

    def __init__(self, model: Any = None, truncated_vocab_size: int | None = None, **kwargs: Any) -> None:
        kwargs = {name: value for name, value in kwargs.items() if name not in ("architectures", "method")}
        super().__init__(model, truncated_vocab_size, method="eagle", **kwargs)
        self.architectures = [ARCHITECTURE]


class Head(nn.Module):
    """A token's distribution from the rows of both serial steps: [batch, 2 H] -> [batch, H]."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        widths = [2 * hidden, *[hidden] * RESIDUAL_BLOCKS]
        self.blocks = nn.ModuleList(nn.Linear(width, hidden, dtype=dtype) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        first, *residual = self.blocks
        x = nn.functional.silu(first(x))
        for block in residual:
            x = x + nn.functional.silu(block(x))
        return x


class GumihoLlamaForCausalLM(EagleLlamaForCausalLM):
    """vLLM's EAGLE with Gumiho's ``fc`` and heads: as many as tokens are drafted beyond the serial steps."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        hidden, dtype = self.config.hidden_size, vllm_config.model_config.dtype
        if getattr(self.config, "gumiho_fc_bias", False):
            self.model.fc = ReplicatedLinear(
                2 * hidden, hidden, bias=True, params_dtype=dtype, quant_config=None, return_bias=False, prefix="fc"
            )
        heads = vllm_config.speculative_config.num_speculative_tokens - SERIAL_STEPS
        self.heads = nn.ModuleList(Head(hidden, dtype) for _ in range(max(0, heads)))

    def fuse(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """tokens: int [batch]; hidden: [batch, H] -> [batch, H]."""
        return self.model.fc(torch.cat((self.model.embed_tokens(tokens), hidden), dim=-1))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Raises ValueError if the drafter has fewer heads than are to draft. Without any, its layers draft all
        tokens."""
        serial, missing, headed = list[tuple[str, Tensor]](), dict(self.heads.named_parameters()), False
        for name, weight in weights:
            if name.startswith("mlp."):
                headed = True
                head, block, kind = name.removeprefix("mlp.").replace(".linear.", ".").split(".")
                if (parameter := missing.pop(f"{head}.blocks.{block}.{kind}", None)) is not None:
                    parameter.data.copy_(weight)
            elif name != "token_map":
                serial.append((name.removeprefix("model."), weight))
        if not headed:
            self.heads = nn.ModuleList()
        elif missing:
            held = {name.partition(".")[0] for name in missing}
            most = SERIAL_STEPS + len(self.heads) - len(held)
            raise ValueError(
                f"num_speculative_tokens is {SERIAL_STEPS + len(self.heads)}: this Gumiho drafts at most {most}"
            )
        super().load_weights(serial)


class GumihoProposer(EagleProposer):
    """EAGLE's, unless the drafter is a Gumiho with heads: the steps after the second one are then theirs."""

    _last_draft_probs: Tensor | None
    _last: Tensor  # the row that the latest draft token was chosen from

    def _sample_draft_tokens(self, hidden_states: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        self._last = hidden_states
        return super()._sample_draft_tokens(hidden_states, sampling_metadata)

    @torch.inference_mode()
    def propose(self, num_speculative_tokens: int, **inputs: Any) -> Tensor:
        gumiho = ARCHITECTURE in self.draft_model_config.hf_config.architectures
        if not gumiho or not self.model.heads:
            return super().propose(num_speculative_tokens, **inputs)
        tokens = super().propose(SERIAL_STEPS, **inputs)
        self.num_speculative_tokens = num_speculative_tokens
        batch, metadata, probs = len(tokens), inputs["sampling_metadata"], self._last_draft_probs
        # The buffers still hold the second step's inputs: the first draft token, and the row that it was chosen from.
        first, second = self.hidden_states[:batch], self._last
        joined = torch.cat((self.model.fuse(tokens[:, 0], first), self.model.fuse(tokens[:, 1], second)), dim=-1)
        heads = self.model.heads[: num_speculative_tokens - SERIAL_STEPS]
        drawn = [super(GumihoProposer, self)._sample_draft_tokens(head(joined), metadata) for head in heads]
        if probs is not None:
            more = torch.stack([one for _, one in drawn if one is not None], 1)
            self._last_draft_probs = torch.cat((probs, more), 1).contiguous()
        return torch.cat((tokens, torch.stack([chosen for chosen, _ in drawn], 1).to(tokens.dtype)), 1)


def install() -> None:
    """Registers configuration and model. The proposer takes the place of EAGLE's in the model runner, which names it
    nowhere else."""
    from transformers import AutoConfig

    _CONFIG_REGISTRY["gumiho"] = GumihoConfig
    AutoConfig.register("gumiho", GumihoConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, f"{__name__}:{ARCHITECTURE}")
    gpu_model_runner.EagleProposer = GumihoProposer
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = _expanded


def _expanded(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """What ``rejection_sampler.expand_batch_to_tokens`` is meant to be. On CPUs, vLLM 0.32.0 fills a copy of it,
    so that drawn texts with drafts of any kind get temperatures out of uninitialized memory
    (``utils/cpu_triton_utils.py``, ``_expand_kernel_impl``)."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts, output_size=num_tokens)
