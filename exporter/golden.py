"""Records the golden run with eager PyTorch over the packed weights."""

from collections.abc import Mapping, Sequence
from io import FileIO
from math import prod
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from graphs.drafter import Drafter
from graphs.ops import Plain, bits_of, dequantize
from graphs.target import Target
from runtime.decoder import walk

from .trace import signature
from .weights import Location

_PROMPT, _TOP = 12, 8
_SLICE_ELEMENTS = 8 << 20


class Weights:
    """Parameters that lie in the weight files and are read a slice at a time, so that little more than a slice is ever held.

    The modules' own parameters are maps of the files, which nothing looks into but for shapes and a few rows of tables.
    """

    def __init__(self, bundle: Path) -> None:
        self._bundle = bundle
        self._places: dict[int, tuple[FileIO, int]] = {}  # by a parameter's address: its file, and where it begins there
        self._files: dict[str, FileIO] = {}
        self._bytes = torch.empty(4 * _SLICE_ELEMENTS, dtype=torch.uint8)
        self._numbers = torch.empty(_SLICE_ELEMENTS)

    def fill(self, module: Target | Drafter, locations: Mapping[str, Location]) -> None:
        """Gives a module of the meta device its parameters."""
        state = {name: locations[name].mapped(self._bundle) for name, _ in module.named_parameters()}
        module.load_state_dict(state, assign=True)
        for name, parameter in state.items():
            place = locations[name]
            if place.file not in self._files:
                self._files[place.file] = (self._bundle / place.file).open("rb", buffering=0)
            self._places[parameter.data_ptr()] = self._files[place.file], place.offset

    def rows(self, matrix: Tensor, start: int, stop: int) -> Tensor:
        """Rows of a parameter, or of one of the matrices stacked in it. They hold until the next are asked for."""
        base = matrix.untyped_storage().data_ptr()
        file, offset = self._places[base]
        part = matrix[start:stop]
        into = self._bytes[: part.numel() * part.itemsize]
        file.seek(offset + part.data_ptr() - base)
        file.readinto(into.numpy().data)
        return into.view(part.dtype).reshape(part.shape)

    def product(self, x: Tensor, weight: Tensor, scale: Tensor | None, transposed: bool = False) -> Tensor:
        """x @ weight.T, or with the matrix itself where it is kept transposed; added up in fp32. x: [n, K] -> fp32 [n, N]."""
        x, made = x.float(), []
        rows = max(1, _SLICE_ELEMENTS // prod(weight.shape[1:]) // (1 if scale is None else 2))
        for start in range(0, weight.shape[0], rows):
            part = self.rows(weight, start, start + rows)
            if scale is None:
                numbers = self._numbers[: part.numel()].view(part.shape).copy_(part)
            else:
                numbers = dequantize(part, scale[start : start + rows], bits_of(part, x.shape[1])).float()
            made.append(x[:, start : start + rows] @ numbers if transposed else x @ numbers.T)
        return torch.stack(made).sum(0) if transposed else torch.cat(made, dim=-1)

    def dialect(self) -> type[Plain]:
        """``Plain``, its products made so."""
        product = self.product

        class Streaming(Plain):
            @classmethod
            def linear(cls, x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
                made = product(x, weight, scale)
                return (made if bias is None else made + bias.float()).to(x.dtype)

            @classmethod
            def residual(
                cls, x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], biases: Sequence[Tensor]
            ) -> Tensor:
                done = []
                for i, head in enumerate(x):
                    for j, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                        # Numbers are kept input-major, codes output-major.
                        made = product(head, weight[i], scales[j][i] if scales else None, transposed=not scales)
                        head = head + F.silu((made + bias[i].float()).to(x.dtype))
                    done.append(head)
                return torch.stack(done)

        return Streaming


def empty(module: Target | Drafter, dtype: torch.dtype) -> list[Tensor]:
    """Caches for a module."""
    return [example for name, example, _ in signature(module, dtype)[0] if name.startswith(("past_key", "past_value"))]


def positions(rows: int) -> int:
    """That the golden run takes at most, for a tree of so many rows."""
    return 2 * _PROMPT + rows


@torch.inference_mode()
def record(target: Target, drafter: Drafter, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """The inputs and outputs that ``runtime.golden.replay`` reads; target and drafter run eagerly over empty caches of dtype."""
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
