"""The static trees of other drafters' code: paths of ranks for ``tree.TreeConfig.static``."""


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    """Paths of one digit a level."""
    return tuple(tuple(map(int, path)) for path in text.split())


# SafeAILab/EAGLE, eagle/model/choices.py, where its name is mc_sim_7b_63 though it has 25 nodes (Apache-2.0).
EAGLE_1 = _paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")
