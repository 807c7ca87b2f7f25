"""Records what a module computes, in one pass over tensors without numbers, as a graph of ONNX operators.

``torch.onnx.export`` goes over a module four times and takes twenty times as long. Tests compare the two
(docs/decisions.md).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import onnx_ir as ir
import sympy
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from graphs.tracing import tracing

from .aten import SPELLINGS
from .fake_results import computed, declared, inferred
from .recording import DTYPES, Like
from .signature import Input, arguments

_PRODUCTS: dict[Any, str] = {
    torch.matmul: "matmul",
    Tensor.matmul: "matmul",
    Tensor.__matmul__: "matmul",
    torch.nn.functional.linear: "linear",
}
_FILLED = {"zeros_like": 0, "ones_like": 1}  # constants, if the tensors that they are like have no open sizes
_MOST_FOLDED = 1 << 16  # numbers of a constant that is computed here


class Recorder(TorchDispatchMode):
    """Appends an operator to ``graph`` for everything that is computed from its inputs and parameters. What depends on
    neither is computed at once, and becomes a constant.

    Tensors are fake; sizes that inputs leave open are ``torch.SymInt``. Implements ``recording.Recording``.
    """

    def __init__(self, module: nn.Module, inputs: Sequence[Input], opset: int) -> None:
        super().__init__()
        # Axes of one name have one size, and those of others another (``signature``).
        self._fakes = FakeTensorMode(shape_env=ShapeEnv(duck_shape=True), allow_non_fake_inputs=True)
        self._fakes.cache_enabled = False
        self.graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name="main_graph")
        self._values: dict[int, ir.Value] = {}
        self._known: dict[int, Tensor] = {}
        self._alive: list[Tensor] = []  # ids are unique as long as their objects live
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._sizes: dict[sympy.Expr, ir.Value] = {}
        self._spellings: dict[sympy.Expr, str | int] = {}
        self._axes: dict[sympy.Symbol, tuple[ir.Value, int, str]] = {}
        self._scopes = [""]
        self._names: dict[str, int] = {}
        self.examples = {name: self._input(name, example, axes) for name, example, axes in inputs}
        for value in self.graph.inputs:  # known by now
            value.shape = self._declared(self.examples[str(value.name)].shape)
        self._parameters: dict[int, Tensor] = {}
        for name, parameter in module.named_parameters():
            shape = ir.Shape(parameter.shape)
            value = ir.Value(name=name, shape=shape, type=ir.TensorType(DTYPES[parameter.dtype]))
            self.graph.initializers[name] = value
            with self._fakes:
                self._parameters[id(parameter)] = fake = torch.empty(parameter.shape, dtype=parameter.dtype)
            self._bind(fake, value)

    def _input(self, name: str, example: Tensor, axes: Mapping[int, str]) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(example.dim())]
        axes_of: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * example.dim())
        fake = self._fakes.from_tensor(example, source=ConstantSource(name), symbolic_context=axes_of)
        value = ir.Value(name=name, type=ir.TensorType(DTYPES[example.dtype]))
        for axis, axis_name in axes.items():
            self._axes.setdefault(_expression(fake.shape[axis]), (value, axis, axis_name))
        self.graph.inputs.append(value)
        self._bind(fake, value)
        return fake

    def finish(self, results: Sequence[Tensor], names: Sequence[str]) -> ir.Graph:
        """Names the outputs and returns the graph."""
        taken = set[ir.Value]()
        for result, name in zip(results, names, strict=True):
            value = self.value(result)
            if value in taken or value.producer() is None:
                value = self.emit("Identity", [value], result)
            taken.add(value)
            value.name = name
            self.graph.outputs.append(value)
        return self.graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        if func is torch.ops.aten.empty.memory_format:  # of a product
            with self._fakes:
                return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if all(self._is_known(x) for x in tensors) and not any(isinstance(x, torch.SymInt) for x in leaves):
            found: Any = computed(func, tree_map(self._number, args), tree_map(self._number, kwargs))
            if found is not None and all(x.numel() <= _MOST_FOLDED for x in tree_leaves(found)):
                return tree_map(self._constant_fake, found)
        args, kwargs = tree_map(self._faked, (args, kwargs))
        name, _, overload = func.__name__.partition(".")
        with self._fakes:
            if func.namespace == "onnx_symbolic":
                found = declared(*args[2:], **kwargs)
            elif (found := inferred(name, args, kwargs)) is None:
                found = func(*args, **kwargs)
        if name in _FILLED and all(isinstance(n, int) for n in found.shape):
            return self._constant_fake(torch.full(found.shape, _FILLED[name], dtype=found.dtype))
        self.record(SPELLINGS.get(f"{name}.{overload}") or SPELLINGS.get(name), func, found, args, kwargs)
        return found

    def product(self, name: str, x: Tensor, y: Tensor, *bias: Tensor | None) -> Tensor:
        """``matmul`` or ``linear``. Neither broadcasts x to more axes."""
        assert 2 <= y.dim() <= x.dim()
        columns = y.shape[0] if name == "linear" else y.shape[-1]
        found = torch.empty([*x.shape[:-1], columns], dtype=x.dtype)
        self.record(SPELLINGS[name], name, found, (x, y, *bias), {})
        return found

    def record(
        self, spelling: Callable[..., Any] | None, func: Any, found: Any, args: Any, kwargs: Mapping[str, Any]
    ) -> None:
        """Emits an operator's spelling. Raises NotImplementedError if it has none."""
        if spelling is None:
            raise NotImplementedError(f"exporter/tracing/aten.py has no spelling of {func}")
        kwargs = {
            name: value
            for name, value in kwargs.items()
            if name not in ("device", "layout", "pin_memory", "memory_format")
        }
        values = spelling(self, found, *args, **kwargs)
        for tensor, value in zip(*([found], [values]) if isinstance(found, Tensor) else (found, values), strict=True):
            self._bind(tensor, value)

    def _bind(self, tensor: Tensor, value: ir.Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def _is_known(self, x: Tensor) -> bool:
        return id(x) in self._known or (not isinstance(x, FakeTensor) and id(x) not in self._parameters)

    def _number(self, x: Any) -> Any:
        return self._known.get(id(x), x) if isinstance(x, Tensor) else x

    def _faked(self, x: Any) -> Any:
        """Parameters are not fake, and neither are constants that the module makes with ``torch.tensor``."""
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        return self._parameters[id(x)] if id(x) in self._parameters else self._constant_fake(x)

    def _constant_fake(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.clone()  # of expanded tensors, every number
        fake = self._fakes.from_tensor(x, static_shapes=True)
        self._known[id(fake)] = x
        self._alive.append(fake)
        return fake

    def value(self, x: Tensor) -> ir.Value:
        return self.constant(self._number(x)) if self._is_known(x) else self._values[id(self._faked(x))]

    def constant(self, x: Tensor) -> ir.Value:
        x = x.detach().contiguous()
        array = x.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype).numpy()
        key = x.dtype, tuple(x.shape), array.tobytes()
        if key not in self._constants:
            name = f"constant.{len(self._constants)}"
            value = ir.Value(name=name, shape=ir.Shape(x.shape), type=ir.TensorType(DTYPES[x.dtype]))
            value.const_value = ir.tensor(array, dtype=DTYPES[x.dtype], name=name)
            self.graph.initializers[name] = value
            self._constants[key] = value
        return self._constants[key]

    def operand(self, x: Any, dtype: torch.dtype, dims: int) -> ir.Value:
        if isinstance(x, torch.SymInt):
            size = self._size(_expression(x))
            size = size if dims else self.emit("Squeeze", [size], (torch.int64, []))
            return self.cast(size, torch.int64, size.shape, dtype)
        if not isinstance(x, Tensor):
            return self.constant(torch.tensor(x, dtype=dtype))
        if self._is_known(x):
            return self.constant(self._number(x).to(dtype))
        return self.cast(self.value(x), x.dtype, x.shape, dtype)

    def cast(self, value: ir.Value, dtype: torch.dtype, shape: Any, to: torch.dtype) -> ir.Value:
        return value if dtype == to else self.emit("Cast", [value], (to, shape), to=DTYPES[to])

    def same_shape(self, first: Sequence[Any], second: Sequence[Any]) -> bool:
        return [_expression(n) for n in first] == [_expression(n) for n in second]

    def shape(self, sizes: Sequence[Any]) -> ir.Value:
        if all(isinstance(n, int) for n in sizes):
            return self.constant(torch.tensor(list(sizes), dtype=torch.int64))
        if len(sizes) == 1:
            return self._size(_expression(sizes[0]))
        parts = [self.shape([n]) for n in sizes]
        return self.emit("Concat", parts, (torch.int64, [len(parts)]), axis=0)

    def reshaped(self, sizes: Sequence[Any]) -> ir.Value:
        is_open = [not isinstance(n, int) for n in sizes]
        return self.shape([-1 if is_open[i] else n for i, n in enumerate(sizes)] if sum(is_open) == 1 else sizes)

    def emit(self, op: str, inputs: Sequence[ir.Value | None], like: Like, **attributes: Any) -> ir.Value:
        (value,) = self.emit_all(op, inputs, [like], **attributes)
        return value

    def emit_all(
        self, op: str, inputs: Sequence[ir.Value | None], like: Sequence[Like], domain: str = "", **attributes: Any
    ) -> list[ir.Value]:
        made = [ir.convenience.convert_attribute(name, value) for name, value in attributes.items()]
        name = self._name(op)
        node = ir.Node(domain, op, inputs, made, num_outputs=len(like), name=name)
        for i, (value, own) in enumerate(zip(node.outputs, like, strict=True)):
            value.name = name if len(like) == 1 else f"{name}:{i}"
            dtype, shape = (own.dtype, own.shape) if isinstance(own, Tensor) else own
            value.type = ir.TensorType(DTYPES[dtype])
            value.shape = shape if isinstance(shape, ir.Shape) else self._declared(shape)
        self.graph.append(node)
        if domain:
            self.graph.opset_imports.setdefault(domain, 1)
        return list(node.outputs)

    def _name(self, op: str) -> str:
        """Names do not end in ``_`` and a number, which TensorRT's parser appends to names of its own."""
        name = f"{self._scopes[-1]}.{op}" if self._scopes[-1] else op
        count = self._names[name] = self._names.get(name, 0) + 1
        return name if count == 1 else f"{name}.{count}"

    def _declared(self, shape: Sequence[Any]) -> ir.Shape:
        return ir.Shape([n if isinstance(n, int) else self._spelled(_expression(n)) for n in shape])

    def _spelled(self, size: sympy.Expr) -> str | int:
        if size not in self._spellings:
            named = size.subs({symbol: sympy.Symbol(name, integer=True) for symbol, (_, _, name) in self._axes.items()})
            self._spellings[size] = int(named) if named.is_Integer else str(named)
        return self._spellings[size]

    def _size(self, size: sympy.Expr) -> ir.Value:
        """An open size, int64 [1], computed from those of the inputs."""
        if size.is_Integer:
            return self.shape([int(size)])
        if size not in self._sizes:
            if size in self._axes:
                value, axis, _ = self._axes[size]
                self._sizes[size] = self.emit("Shape", [value], (torch.int64, [1]), start=axis, end=axis + 1)
            else:
                op = {"Add": "Add", "Mul": "Mul", "FloorDiv": "Div", "CleanDiv": "Div"}[type(size).__name__]
                first, *rest = (self._size(part) for part in size.args)
                for other in rest:
                    first = self.emit(op, [first, other], (torch.int64, [1]))
                self._sizes[size] = first
        return self._sizes[size]


class _Products(TorchFunctionMode):
    """Records matrix products, which PyTorch splits into operators of fewer axes before a dispatch mode sees them."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = _PRODUCTS.get(func)
        return self._recorder.product(name, *args, **(kwargs or {})) if name else func(*args, **(kwargs or {}))


def _expression(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def capture(module: nn.Module, inputs: Sequence[Input], outputs: Sequence[str], opset: int) -> ir.Model:
    """The graph of a module, whose parameters become initializers without values: they may be on the meta device.

    inputs, outputs: those of ``signature``.
    """
    recorder = Recorder(module, inputs, opset)
    with ExitStack() as stack, torch.inference_mode(False), torch.no_grad(), tracing():
        for name, part in module.named_modules():
            if name:
                stack.callback(
                    part.register_forward_pre_hook(lambda *_, name=name: recorder._scopes.append(name)).remove
                )
                stack.callback(part.register_forward_hook(lambda *_: recorder._scopes.pop() and None).remove)
        with recorder, _Products(recorder):
            results = module(*arguments(module, recorder.examples))
    return ir.Model(recorder.finish([results] if isinstance(results, Tensor) else results, outputs), ir_version=10)
