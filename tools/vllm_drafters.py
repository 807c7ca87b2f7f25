"""Drafters of any family as both vLLM and this project read them, for ``tools.check_vllm``."""

import json
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from exporter import DraftTree, ExportConfig, export
from exporter.checkpoints.checkpoint import Checkpoint
from exporter.checkpoints.drafters import open_drafter
from exporter.checkpoints.drafters.medusa import MedusaReader
from exporter.checkpoints.drafters.reader import LM_HEAD
from exporter.checkpoints.families import EAGLE, EAGLE_3, GUMIHO, MEDUSA, SMALL
from exporter.checkpoints.pair import Pair
from graphs.dialects.quantization import EMBEDDING
from gumiho_vllm import SERIAL_STEPS
from runtime.errors import InputError

_METHODS = {GUMIHO: "eagle", EAGLE: "eagle", EAGLE_3: "eagle3", MEDUSA: "medusa", SMALL: "draft_model"}
State = dict[str, Tensor]


@dataclass(frozen=True)
class Drafter:
    """method: vLLM's name of the family. ours, theirs: the folders that the exporter and vLLM read. chains: the numbers
    of tokens to draft, the most last. tree: the longest chain, for the exporter. known: the tokens that our export
    drafts."""

    name: str
    family: str
    method: str
    ours: Path
    theirs: Path
    chains: tuple[int, ...]
    tree: DraftTree
    known: Container[int]


def prepared(folder: Path, target: Path, out: Path, most: int) -> list[Drafter]:
    """Writes what vLLM reads of a drafter into ``out``, unless it reads the folder itself. most: tokens to draft.

    An EAGLE whose ``fc`` has a bias, which vLLM itself ignores, is compared twice: with an embedding that includes the
    bias, and as exported for our plugin.

    Raises InputError for a family that vLLM does not have.
    """
    pair = Pair(Checkpoint(str(target), "target"), open_drafter(str(folder)))
    family = pair.family
    if family not in _METHODS:
        raise InputError(f"drafter '{folder}' is of the family {family}, which vLLM does not have: leave it out")
    drafted = pair.draft_vocabulary
    known = range(pair.target_shape.vocabulary) if drafted is None else frozenset(drafted.ids.tolist())
    given = Drafter(
        folder.name,
        family,
        _METHODS[family],
        ours=folder,
        theirs=folder,
        chains=tuple(dict.fromkeys((1, most))),
        tree=DraftTree(policy="chain", serial_steps=most),
        known=known,
    )
    if family == GUMIHO:
        heads = min(pair.heads, most - SERIAL_STEPS)
        tree = DraftTree(policy="chain", serial_steps=SERIAL_STEPS, heads=heads)
        chains = tuple(dict.fromkeys((1, SERIAL_STEPS, SERIAL_STEPS + heads)))
        return [replace(given, theirs=_exported(folder, target, out), chains=chains, tree=tree)]
    if family == EAGLE and "fc.bias" in pair.drafter:
        unbiased = _written(out / "unbiased", *_unbiased(pair))
        return [
            replace(given, name=f"{folder.name} without fc.bias", ours=unbiased, theirs=unbiased),
            replace(given, theirs=_exported(folder, target, out / "exported")),
        ]
    if family == MEDUSA:
        whole = _written(out, *_medusa(pair))
        tree = DraftTree(policy="chain", heads=pair.heads)
        return [replace(given, ours=whole, theirs=whole, chains=(pair.heads,), tree=tree)]
    return [given]


def _exported(folder: Path, target: Path, out: Path) -> Path:
    return export(ExportConfig(ckpt=(folder,), target=target, backend=("vllm",), out=out, overwrite=True))


def _state(pair: Pair) -> State:
    return {name: pair.drafter.read(name) for name in sorted(pair.drafter.names())}


def _unbiased(pair: Pair) -> tuple[dict[str, Any], State]:
    """An EAGLE's config.json and tensors without ``fc.bias``, and with an embedding that is moved by what ``fc`` turns
    into it. vLLM takes ``bias`` for attention's, which it then has without values."""
    config = {name: value for name, value in pair.drafter.config.items() if name != "bias"}
    state = {name: tensor.float() for name, tensor in _state(pair).items()}
    embedding = state.get(EMBEDDING, pair.target.read(EMBEDDING).float())
    reads = state["fc.weight"][:, : embedding.shape[1]].double()
    moved = torch.linalg.lstsq(reads, state.pop("fc.bias").double()[:, None]).solution[:, 0]
    return config, state | {EMBEDDING: embedding + moved.float()}


def _medusa(pair: Pair) -> tuple[dict[str, Any], State]:
    """Its config.json and tensors with one lm_head for all heads. vLLM does not use the target's lm_head, and does not
    notice if there is none."""
    reader, shape = pair.reader, pair.target_shape
    assert isinstance(reader, MedusaReader)
    if not reader.one_head:
        raise InputError(f"drafter '{pair.drafter.source}' has lm_heads of its own: give one without them")
    head = LM_HEAD if LM_HEAD in pair.target else EMBEDDING
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": shape.hidden,
        "vocab_size": shape.vocabulary,
        "num_heads": pair.heads,
        "num_hidden_layers": reader.blocks,
        "medusa_fc_bias": reader.bias,
        "original_lm_head": True,
    }
    return config, _state(pair) | {"lm_heads.0.weight": pair.target.read(head)}


def _written(folder: Path, config: dict[str, Any], state: State) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder
