"""The vocabulary of the operator tables: what a rule may say of a node's types, attributes and inputs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

# Element types, a letter each; a string of letters is a choice.
_LETTERS = {
    "f": ir.DataType.FLOAT, "h": ir.DataType.FLOAT16, "g": ir.DataType.BFLOAT16, "i": ir.DataType.INT32, "l": ir.DataType.INT64,
    "b": ir.DataType.BOOL, "B": ir.DataType.UINT8, "c": ir.DataType.INT8, "N": ir.DataType.UINT4, "n": ir.DataType.INT4, "e": ir.DataType.FLOAT8E4M3FN,
}  # fmt: skip
FLOATS, INTS, BOOL = "fhg", "il", "b"
NUMBERS = FLOATS + INTS
ANY = NUMBERS + BOOL


@dataclass(frozen=True)
class Facts:
    """Element type and shape of a value, None where they are not known."""

    dtype: ir.DataType | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Use:
    """A node and the facts of its values; those of an input that is left out are None, its shape is ()."""

    node: ir.Node
    inputs: list[Facts | None]
    outputs: list[Facts]

    def has(self, i: int) -> bool:
        return i < len(self.inputs) and self.inputs[i] is not None

    def type(self, i: int) -> ir.DataType | None:
        facts = self.inputs[i] if self.has(i) else None
        return facts and facts.dtype

    def shape(self, i: int) -> tuple[int, ...]:
        facts = self.inputs[i] if self.has(i) else None
        return (facts and facts.shape) or ()

    def whole(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def text(self, name: str, default: str) -> str:
        return str(self.node.attributes.get_string(name, default))

    def axis(self, default: int) -> int:
        """The attribute ``axis``, counted from the front of the first input."""
        return self.whole("axis", default) % max(1, len(self.shape(0)))


@dataclass(frozen=True)
class Rule:
    """What a parser takes of one operator, a line of its table.

    types: of each input, separated by blanks, the last for all that follow. attributes: those it honours, or may ignore without
    harm. constant: positions of the inputs that must be known when parsing; stored: of those that must be initializers or
    Constants, and not computed from them. most: inputs and outputs at most. refuse: says what else it does not take.
    """

    types: str
    attributes: str = ""
    constant: str = ""
    stored: str = ""
    most: tuple[int, int] = (99, 99)
    domain: str = ""
    refuse: Callable[[Use], str] = lambda use: ""


@dataclass(frozen=True)
class Parser:
    """Of a backend. opsets: that it knows, as far back as ours could go. io_dtypes: element types of a graph's inputs and outputs; types: of all other values.

    operators: by name; a string says why one that the parser knows must not be used. empty: whether tensors without elements
    are taken. positional: whether external data are read by the order of their entries. floating: whether integers are computed
    in fp32 without rounding, so that only ``exporter.backends.ranges`` tells whether they stay what they are.
    """

    label: str
    opsets: range
    io_dtypes: str
    types: str
    operators: Mapping[str, Rule | str] = field(repr=False)
    empty: bool
    positional: bool
    floating: bool = False


def one_of(attribute: str, default: str, *accepted: str) -> Callable[[Use], str]:
    def refuse(use: Use) -> str:
        found = use.text(attribute, default)
        return "" if found in accepted else f"has {attribute} '{found}'"

    return refuse


REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
REDUCED = "axes keepdims noop_with_empty_axes"
UNARY = ("Exp", "Log", "Sqrt", "Erf", "Sigmoid", "Tanh", "Reciprocal", "Floor", "IsNaN")
CONSTANTS = "value value_float value_floats value_int value_ints"


def float_mod(use: Use) -> str:
    return "has floats and no fmod" if use.type(0) in dtypes(FLOATS) and not use.whole("fmod", 0) else ""


def no_axes(use: Use) -> str:
    """Both count axes they are not told by the rank, not by the starts."""
    return "" if use.has(3) or use.shape(1) == (len(use.shape(0)),) else "has no axes"


def odd_nibbles(use: Use) -> bool:
    """4-bit rows that do not fill their last byte."""
    return use.type(0) in dtypes("nN") and bool(use.shape(0)) and use.shape(0)[-1] % 2 == 1


def dtypes(letters: str) -> list[ir.DataType]:
    return [_LETTERS[letter] for letter in letters]


def named(letters: str) -> str:
    return ", ".join(dtype.name for dtype in dtypes(letters))
