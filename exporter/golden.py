"""Records the golden run with eager PyTorch over the packed weights."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from graphs.drafter import Drafter
from graphs.target import Target
from runtime.decoder import walk

from .trace import signature
from .weights import Location

_PROMPT, _TOP = 12, 8


def eager(
    module: Target | Drafter, locations: dict[str, Location], bundle: Path, dtype: torch.dtype
) -> tuple[Target | Drafter, list[Tensor]]:
    """A module of the meta device with its parameters mapped from the weight files, and empty caches for it."""
    state = {name: locations[name].mapped(bundle) for name, _ in module.named_parameters()}
    module.load_state_dict(state, assign=True)
    caches = [
        example.clone() for name, example, _ in signature(module, dtype)[0] if name.startswith(("past_key", "past_value"))
    ]
    return module, caches


@torch.inference_mode()
def record(target: Target, target_caches: list[Tensor], drafter: Drafter, draft_caches: list[Tensor]) -> dict[str, np.ndarray]:
    """The inputs and outputs that ``runtime.golden.replay`` reads; target and drafter run eagerly over empty caches."""
    run: dict[str, Tensor] = {}
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
