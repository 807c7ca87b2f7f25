"""The building blocks of the operator tables: rules for the types, attributes and inputs of a node."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

# One letter per element type; a string of letters means any of them.
_LETTERS = {
    "f": ir.DataType.FLOAT,
    "h": ir.DataType.FLOAT16,
    "g": ir.DataType.BFLOAT16,
    "i": ir.DataType.INT32,
    "l": ir.DataType.INT64,
    "b": ir.DataType.BOOL,
    "B": ir.DataType.UINT8,
    "c": ir.DataType.INT8,
    "N": ir.DataType.UINT4,
    "n": ir.DataType.INT4,
    "e": ir.DataType.FLOAT8E4M3FN,
}
FLOATS, INTS, BOOL = "fhg", "il", "b"
NUMBERS = FLOATS + INTS
ANY = NUMBERS + BOOL


@dataclass(frozen=True)
class Facts:
    """Element type and shape of a value; None if unknown."""

    dtype: ir.DataType | None
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Use:
    """A node and the facts of its values. An omitted input has None, and the shape ()."""

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

    def integer(self, name: str, default: int) -> int:
        return int(self.node.attributes.get_int(name, default))

    def string(self, name: str, default: str) -> str:
        return str(self.node.attributes.get_string(name, default))

    def axis(self, default: int) -> int:
        """The attribute ``axis``, counted from the front of the first input."""
        return self.integer("axis", default) % max(1, len(self.shape(0)))


@dataclass(frozen=True)
class Rule:
    """What a parser supports of one operator: a line of its table.

    types: of each input, separated by blanks; the last applies to all further inputs. attributes: those that it
    honours, or may safely ignore. constant: positions of the inputs that must be constant when parsing; stored: of
    those that must be initializers or Constants, not computed from them. most: the largest numbers of inputs and
    outputs. refuse: returns a phrase for anything else that is not supported, "" if all is.
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
    """The ONNX parser of a backend.

    opsets: the supported ones that our graphs could use. io_dtypes: element types of a graph's inputs and outputs;
    types: of all other values. operators: rules by name; a string says why an operator must not be used although the
    parser knows it. empty: whether it supports tensors without elements. positional: whether it reads the entries of
    external data by their order. floating: whether it computes integers in fp32 without rounding;
    ``exporter.backends.ranges`` then checks that they stay exact.
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
    """A check that a string attribute has one of the accepted values."""

    def refuse(use: Use) -> str:
        value = use.string(attribute, default)
        return "" if value in accepted else f"has {attribute} '{value}'"

    return refuse


REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")
REDUCED = "axes keepdims noop_with_empty_axes"
UNARY = ("Exp", "Log", "Sqrt", "Erf", "Sigmoid", "Tanh", "Reciprocal", "Floor", "IsNaN")
CONSTANTS = "value value_float value_floats value_int value_ints"


def float_mod(use: Use) -> str:
    return "has floats but no fmod" if use.type(0) in dtypes(FLOATS) and not use.integer("fmod", 0) else ""


def no_axes(use: Use) -> str:
    """Without axes, both parsers take as many as the input has dimensions, ONNX as many as there are starts."""
    return "" if use.has(3) or use.shape(1) == (len(use.shape(0)),) else "has no axes"


def has_odd_nibbles(use: Use) -> bool:
    """Whether 4-bit rows do not fill their last byte."""
    return use.type(0) in dtypes("nN") and bool(use.shape(0)) and use.shape(0)[-1] % 2 == 1


def dtypes(letters: str) -> list[ir.DataType]:
    return [_LETTERS[letter] for letter in letters]


def named(letters: str) -> str:
    return ", ".join(dtype.name for dtype in dtypes(letters))
