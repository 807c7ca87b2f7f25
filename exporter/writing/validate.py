"""``--validate``: compares the bundle's engines with eager PyTorch, which reads the checkpoints.

The target is compared with transformers' model, the drafter with the traced module over the checkpoint's tensors, so
that errors of packing, tracing and compiling show. Both models are completely in memory, in fp32 or quantized like the
bundle.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphs.dialects.quantization import EMBEDDING, bits_of, dequantize
from graphs.drafter import Drafter
from graphs.token_digits import digits_of
from runtime.api.loader import load
from runtime.decoding.cycle import Accepted
from runtime.decoding.decoder import Decoder

from ..checkpoints.llama import transformers_model
from ..recipe.recipe import Recipe
from ..tracing.signature import signature
from ..weights.quantize import scale_of, zero_of

_POSITIONS = 256


@torch.inference_mode()
def validate(recipe: Recipe, folder: Path, backend_name: str, device: str = "") -> dict[str, float]:
    """Runs random tokens through a finished bundle in chunks of uneven size.

    Returns the largest error of the target's logits and hidden rows (relative to the largest value), the share of
    positions where the target's choice differs, and with a drafter the largest error of the tree's scores (in nats).
    """
    count = min(_POSITIONS, recipe.capacity)
    ids = torch.randint(0, recipe.pair.target_shape.vocabulary, (count,), generator=torch.Generator().manual_seed(1))
    llama = _reference(recipe)
    before_norm: list[Tensor] = []
    llama.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
    outputs = llama.model(ids[None], output_hidden_states=bool(recipe.pair.returns.taps))
    hidden = outputs.last_hidden_state[0]
    logits = llama.lm_head(hidden)
    returns = recipe.pair.returns
    parts = [hidden] if returns.normed else []
    if returns.taps:  # the last of transformers' is normed
        entering = [*outputs.hidden_states[:-1], *before_norm]
        parts += [entering[tap][0] for tap in returns.taps]
    hidden = torch.cat([*parts, *([digits_of(ids)] if returns.digits else ())], dim=-1)
    if returns.taps and recipe.dtype == torch.bfloat16:  # the graph's are fp16
        largest = torch.finfo(torch.float16).max
        hidden = hidden.clamp(-largest, largest)

    logit_parts, hidden_parts, choice_parts = [], [], []
    with load(folder, backend_name, device) as model:
        decoder = model.decoder
        start = 0
        while start < count:
            n = min(1 + start % 37, decoder.form.chunk, count - start)
            decoder.feed(ids[start : start + n].tolist())
            logit_parts.append(decoder.device.read(decoder.target.logits[:n]).copy())
            hidden_parts.append(decoder.device.read(decoder.target.hidden[:n]).copy())
            choice_parts.append(decoder.target.choice[:n].copy())
            start += n
        names = model.bundle.manifest.each if recipe.pair.has_drafter else ()
        drafted = {name: _drafted_scores(model.decoders.use(name), ids) for name in names}

    rows, parted = np.concatenate(hidden_parts), returns.parts(recipe.pair.target_shape.hidden)
    errors = {
        "target logits": _relative(np.concatenate(logit_parts), logits),
        "target hidden": float(np.max([_relative(rows[:, part], hidden[:, part]) for part in parted])),  # NaN stays NaN
        "choices that differ": float((np.concatenate(choice_parts) != logits.argmax(-1).numpy()).mean()),
    }
    own = torch.from_numpy(rows).float()  # a quantized target's rounding is not the drafter's error
    scores = [
        np.abs(found - _tree_scores(recipe.further.get(name, recipe), ids, pending, own).numpy()).max()
        for name, (found, pending) in drafted.items()
    ]
    if scores:
        errors["draft scores"] = float(np.max(scores))
    return errors


def _reference(recipe: Recipe) -> Any:
    """transformers' model of the target, fp32, with the numbers that the bundle's codes represent."""
    checkpoint = recipe.pair.target  # it also reads shards without an index, which transformers' loader does not
    weights = {n: checkpoint.read(n).float() for n in checkpoint.names()}
    weights.setdefault("lm_head.weight", weights[EMBEDDING])  # which may be quantized where the embedding is not
    sources = recipe.sources(apart=True)["weights/target.bin"]
    for name, scale in ((n, scale_of(n)) for n in weights):
        if name != scale and scale in sources:
            codes = sources[name].whole()
            bits = bits_of(codes, weights[name].shape[1])
            zero = sources[zero_of(name)].whole() if zero_of(name) in sources else None
            weights[name] = dequantize(codes, sources[scale].whole(), bits, zero).float()
        elif name in recipe.factors:
            weights[name] = sources[name].whole()
    return transformers_model(recipe.pair.target_config, weights, weights.__getitem__)


def _drafted_scores(decoder: Decoder, ids: Tensor) -> tuple[np.ndarray, int]:
    """The scores of the engines' tree after ``ids``, and its root."""
    decoder.clear()
    decoder.text = ids.tolist(), ()
    last = decoder.prefill(ids.tolist(), speculate=True)
    assert last is not None
    decoder.catch_up()
    pending = int(decoder.target.choice[last])
    decoder.draft.drafting(Accepted((last,), (pending,)))()
    decoder.device.synchronize()
    scores, _ = decoder.draft.scored()
    return np.array(scores), pending


def _tree_scores(recipe: Recipe, ids: Tensor, pending: int, hidden: Tensor) -> Tensor:
    """The scores of the tree after ``ids``, fp32 [rows], drafted from the target's rows [len(ids), features]."""
    module = recipe.pair.modules(
        recipe.tree, recipe.capacity + recipe.pair.ahead, recipe.positions, schemes=recipe.schemes(recipe.codes[0])
    )["draft"]
    assert isinstance(module, Drafter)
    state = {name: source.whole() for name, source in recipe.sources()["weights/draft.bin"].items()}
    module.load_state_dict(
        {n: t.float() if t.is_floating_point() and t.itemsize > 1 else t for n, t in state.items()}, assign=True
    )
    caches = [
        example
        for name, example, _ in signature(module, torch.float32)[0]
        if name.startswith(("past_key", "past_value"))
    ]
    tokens, path = torch.cat((ids[1:], torch.tensor([pending]))), torch.arange(len(ids))
    return module(tokens, hidden, path, torch.tensor([len(ids)]), torch.tensor([0]), caches)[4]


def _relative(actual: np.ndarray, expected: Tensor) -> float:
    return float(np.abs(actual - expected.numpy()).max() / expected.abs().max())
