"""The static trees of other drafters' code: paths of ranks for ``tree.TreeConfig.static``.

Medusa's paths are listed best first, so that the first ones are a good smaller tree; EAGLE-1's are not.
"""


def _paths(text: str) -> tuple[tuple[int, ...], ...]:
    """Parses paths with one digit per level."""
    return tuple(tuple(map(int, path)) for path in text.split())


# SafeAILab/EAGLE, eagle/model/choices.py, where its name is mc_sim_7b_63 though it has 25 nodes (Apache-2.0).
EAGLE_1 = _paths("0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001")

# FasterDecoding/Medusa, medusa/model/medusa_choices.py, mc_sim_7b_63, also used by Hydra (Apache-2.0). A rank is that
# of a head's token.
MEDUSA = _paths(
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)
