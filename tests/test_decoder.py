"""The accept_path down a tree against following the choices token by token."""

from hypothesis import given
from hypothesis import strategies as st

from runtime.decoding.acceptance import accept_path


@given(st.data())
def test_walk_follows_the_choices(data: st.DataObject) -> None:
    """Parents precede children and siblings have different tokens, as in every tree that is drafted. Most choices are a
    child's token, so that paths are long."""
    rows = data.draw(st.integers(1, 20))
    parents = [0, *(data.draw(st.integers(0, row - 1)) for row in range(1, rows))]
    tokens: list[int] = []
    for row in range(rows):
        taken = {tokens[other] for other in range(1, row) if row and parents[other] == parents[row]}
        tokens.append(data.draw(st.sampled_from([t for t in range(25) if t not in taken])))
    children = {(parents[row], tokens[row]): row for row in range(1, rows)}
    drafted = {row: [token for parent, token in children if parent == row] for row in range(rows)}
    choices = [data.draw(st.sampled_from([*drafted[row] * 3, 24])) for row in range(rows)]

    expected = [0]
    while (expected[-1], choices[expected[-1]]) in children:
        expected.append(children[expected[-1], choices[expected[-1]]])
    assert accept_path(tokens, parents, choices.__getitem__) == expected
