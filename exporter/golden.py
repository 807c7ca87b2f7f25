"""Records the golden run with eager PyTorch over the packed weights."""

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.drafter import Drafter
from graphs.ops import Plain, dequantize
from graphs.target import Target
from runtime.decoder import walk

from .trace import signature
from .weights import Location

_PROMPT, _TOP = 12, 8
_SLICE_ELEMENTS = 16 << 20


def streaming(maps: Mapping[int, mmap.mmap]) -> type[Plain]:
    """``Plain`` over mapped weights, which let go of their memory as soon as they were multiplied with: whatever the size of the
    model, little more is held than a slice of one matrix. Products are added up in fp32.

    maps: by the address where a parameter begins.
    """

    class Streaming(Plain):
        @classmethod
        def linear(cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
            rows, out = max(1, _SLICE_ELEMENTS // x.shape[1]), []
            for start in range(0, weight.shape[0], rows):
                part = weight[start : start + rows]
                numbers = part if scale is None else dequantize(part, scale[start : start + rows])
                out.append(x.float() @ numbers.float().T)
                maps[weight.untyped_storage().data_ptr()].madvise(mmap.MADV_DONTNEED)
            made = torch.cat(out, dim=-1)
            return (made if bias is None else made + bias.float()).to(x.dtype)

        @classmethod
        def residual(cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
            done = []
            for i, head in enumerate(x):
                for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                    # Numbers are kept input-major, codes output-major.
                    matrix, scale = (weight[i], scales[j][i]) if scales else (weight[i].T, None)
                    head = head + F.silu(cls.linear(head, matrix, scale, bias[i]))
                done.append(head)
            return torch.stack(done)

    return Streaming


def fill(module: Target | Drafter, locations: Mapping[str, Location], bundle: Path, maps: dict[int, mmap.mmap]) -> None:
    """Maps the parameters of a module of the meta device from the weight files, and notes the maps."""
    state = {}
    for name, _ in module.named_parameters():
        place = locations[name]
        mapped = place.map(bundle)
        state[name] = torch.frombuffer(mapped, dtype=torch.uint8).view(place.dtype).reshape(place.shape)
        maps[state[name].untyped_storage().data_ptr()] = mapped
    module.load_state_dict(state, assign=True)


def empty(module: Target | Drafter, dtype: torch.dtype) -> list[Tensor]:
    """Caches for a module."""
    return [example for name, example, _ in signature(module, dtype)[0] if name.startswith(("past_key", "past_value"))]


def positions(rows: int) -> int:
    """That the golden run takes at most, for a tree of so many rows."""
    return 2 * _PROMPT + rows


@torch.inference_mode()
def record(target: Target, drafter: Drafter, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The inputs and outputs that ``runtime.golden.replay`` reads; target and drafter run eagerly over empty caches."""
    run: dict[str, Tensor] = {}
    target_caches, draft_caches = empty(target, dtype), empty(drafter, dtype)
    vocabulary = target.embed_tokens.num_embeddings
    assert drafter.tree
    # No longer than the tree: a pass of that many rows fits every backend.
    prompt = torch.randint(
        0, vocabulary, (min(_PROMPT, target.capacity // 2, drafter.tree.rows),), generator=torch.Generator().manual_seed(0)
    )

    def target_pass(name: str, tokens: Tensor, depth: Tensor, mask: Tensor, past: int, caches: list[Tensor]) -> list[Tensor]:
        choice, logits, hidden, *caches = target(tokens, depth, mask, torch.tensor([past]), caches)
        top = logits.topk(min(_TOP, vocabulary), dim=-1)
        run.update({f"{name}.{k}": v for k, v in {
            "tokens": tokens, "depth": depth, "mask": mask, "choice": choice, "hidden": hidden,
            "top_ids": top.indices, "top_logits": top.values.float(),
        }.items()})  # fmt: skip
        return caches

    def draft_pass(name: str, tokens: Tensor, path: Tensor, hidden: Tensor, past: int, caches: list[Tensor]) -> list[Tensor]:
        count = torch.tensor([len(tokens)])
        tree, depth, parent, mask, score, *caches = drafter(tokens, hidden, path, count, torch.tensor([past]), caches)
        run.update({f"{name}.{k}": v for k, v in {
            "tokens": tokens, "path": path, "count": count, "score": score, "tree": tree, "depth": depth, "parent": parent, "mask": mask,
        }.items()})  # fmt: skip
        return caches

    n = len(prompt)
    target_caches = target_pass("prompt", prompt, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril(), 0, target_caches)
    hidden, pending = run["prompt.hidden"], run["prompt.choice"][-1:]
    tokens = torch.cat((prompt[1:], pending))
    # The drafter reads the prompt and the pending token in two passes, as the runtime does.
    draft_caches = draft_pass("warm", tokens[:-1], torch.arange(n - 1), hidden, 0, draft_caches)
    draft_caches = draft_pass("tree", pending, torch.tensor([n - 1]), hidden, n - 1, draft_caches)
    rows = min(len(run["tree.tree"]), target.capacity - n)  # a prefix of the tree is a tree
    tree = {k: run[f"tree.{k}"][:rows] for k in ("tree", "depth", "parent")}
    target_pass("verify", tree["tree"], tree["depth"], run["tree.mask"][:rows, :rows].contiguous(), n, target_caches)
    choice = run["verify.choice"]
    path = torch.tensor(walk(tree["tree"].tolist(), tree["parent"].tolist(), choice.tolist().__getitem__))
    draft_pass("next", choice[path], path, run["verify.hidden"], n, draft_caches)
    return {name: value.numpy() for name, value in run.items() if not name.startswith("warm.")}
