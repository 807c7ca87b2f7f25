"""Checks that the rows of a pass have the same logits, bit for bit, as in passes of a single row."""

import itertools
from collections.abc import Sequence

import numpy as np

from ...api.model import Model
from ...decoding.cycle import Tree
from ...decoding.decoder import Decoder

_LONG = 1012  # tokens, so that trees come to a border between panels (TargetPasses.in_order)
_SHORT = 12  # tokens of the other texts


def rows_alone(model: Model, prompt: Sequence[int]) -> tuple[int, int]:
    """Recomputes the rows of a text's trees, each in a pass of its own. Lossless output depends on equal rows, and
    these depend on the processor's kernels.

    Returns the number of rows, and the number of rows whose logits are not bitwise equal.
    """
    prompts = [prompt]
    if model.decoder.target.graphs["target"].open_caches:  # a long text has several panels
        prompts.append(
            list(
                itertools.islice(
                    itertools.cycle(prompt), min(_LONG, model.capacity - model.bundle.manifest.rows - _SHORT)
                )
            )
        )
    rows = unequal = 0
    for own in prompts:
        trees, known = _trees(model, own), 0
        with model.exclusive() as decoder:
            decoder.clear()
            for text, tree, logits in trees:  # each goes on where the one before began
                decoder.target.keep(known)
                decoder.prefill(text, speculate=False)
                known = len(text)
                paths = [[0]]
                for row in range(1, len(tree.tokens)):
                    paths.append([*paths[tree.parents[row]], row])
                for path, tree_logits in zip(paths, logits, strict=True):
                    decoder.target.keep(known)
                    for row in path:
                        decoder.feed([tree.tokens[row]])
                    unequal += not np.array_equal(decoder.target.row(0), tree_logits)
                rows += len(logits)
    return rows, unequal


def _trees(model: Model, prompt: Sequence[int]) -> list[tuple[list[int], Tree, np.ndarray]]:
    return _drafted(model, prompt) if model.bundle.manifest.has_drafter else [_chain(model, prompt)]


def _drafted(model: Model, prompt: Sequence[int]) -> list[tuple[list[int], Tree, np.ndarray]]:
    """The trees of a text, each with the tokens before it and its rows' logits [rows, V]."""
    text, trees = list(prompt), list[tuple[list[int], Tree, np.ndarray]]()
    for cycle in model.generate(prompt, _SHORT, rows=model.bundle.manifest.rows, trace=True).cycles():
        if cycle.tree:
            trees.append((text[:-1], cycle.tree, _logits(model.decoder, cycle.tree)))
        text += cycle.tokens
    return trees


def _chain(model: Model, prompt: Sequence[int]) -> tuple[list[int], Tree, np.ndarray]:
    """A pass over a chain of the prompt's own tokens, as for looked-up ones: the tokens before it, its rows and their
    logits [rows, V]."""
    manifest = model.bundle.manifest
    tree = Tree.chain([prompt[i % len(prompt)] for i in range(min(manifest.rows, manifest.capacity - len(prompt)))])
    with model.exclusive() as decoder:
        decoder.clear()
        decoder.prefill(prompt, speculate=False)
        decoder.feed(tree.tokens)
        return list(prompt), tree, _logits(decoder, tree)


def _logits(decoder: Decoder, tree: Tree) -> np.ndarray:
    return np.stack([decoder.target.row(row) for row in range(len(tree.tokens))])
