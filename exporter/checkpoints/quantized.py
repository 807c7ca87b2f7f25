"""Targets that GPTQ, AWQ or compressed-tensors quantized to 4 bits: their codes as bundles keep them, and the numbers
they stand for.

All three store w = scale * (code - zero) with a scale and a zero point for each group of a row, and eight codes per
int32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from graphs.dialects.quantization import dequantize, pack, pack_zeros, unpack
from runtime.errors import DamageError, InputError

from ..weights.source import CODED_BLOCK, Coded, Part, Stored
from .checkpoint import Checkpoint
from .json_config import shown

_SLICE_ELEMENTS = 1 << 22
_WORD = 8  # codes in an int32
_GROUPS = (32, 64, 128)
_SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class _Format:
    """How a library stores a matrix [N, K] of groups. Each tensor is named ``MODULE.ENDING``, in place of
    ``MODULE.weight``.

    codes, scales, zeros: the endings; zeros is "" without zero points. indices: of a tensor with the group of every
    column, which must be consecutive.
    """

    method: str
    group: int
    codes: str
    scales: str
    zeros: str
    indices: str
    order: ClassVar[tuple[int, ...]] = tuple(range(_WORD))  # of outputs or inputs in a word: the place of each

    def endings(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.codes, self.scales, self.zeros, self.indices)))

    def unpacked(self, words: Tensor) -> Tensor:
        """The codes of int32 [..., n]: uint8 [..., 8 n]."""
        own = words.clone(memory_format=torch.contiguous_format)  # a view of bytes needs strides that a slice may lack
        codes = unpack(own.view(torch.uint8))  # little-endian: the first code is in the low bits of the first byte
        if self.order == tuple(range(_WORD)):
            return codes
        return codes.unflatten(-1, (-1, _WORD))[..., list(self.order)].flatten(-2)

    def size(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """N and K of a matrix by the shape of its codes."""
        raise NotImplementedError

    def shapes(self, outputs: int, inputs: int) -> _Shapes:
        """The shapes of the other tensors, by ending."""
        raise NotImplementedError

    def rows(self, checkpoint: Checkpoint, module: str, rows: slice) -> Part:
        """Codes uint8 [n, K], scales [n, K / group] and zero points uint8 [n, K / group] of rows, which are multiples
        of 8."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Gptq(_Format):
    """qweight [K / 8, N]; scales [K / group, N]; qzeros [K / group, N / 8], less one in the first version of the format
    (AutoGPTQ's and GPTQModel's ``gptq``, as opposed to ``gptq_v2``)."""

    subtracted: int

    def size(self, codes: tuple[int, ...]) -> tuple[int, int]:
        return codes[1], codes[0] * _WORD

    def shapes(self, outputs: int, inputs: int) -> _Shapes:
        groups = inputs // self.group
        return {self.scales: (groups, outputs), self.zeros: (groups, outputs // _WORD)}

    def rows(self, checkpoint: Checkpoint, module: str, rows: slice) -> Part:
        codes = self.unpacked(checkpoint.cut(f"{module}.{self.codes}", (slice(None), rows)).T)
        return codes, *self._groups(checkpoint, module, rows)

    def _groups(self, checkpoint: Checkpoint, module: str, rows: slice) -> tuple[Tensor, Tensor]:
        words = slice(rows.start // _WORD, rows.stop // _WORD)
        scale = checkpoint.cut(f"{module}.{self.scales}", (slice(None), rows)).T
        zero = self.unpacked(checkpoint.cut(f"{module}.{self.zeros}", (slice(None), words))).T + self.subtracted
        if int(zero.max()) > 15:  # libraries read it as 0 or as 16
            raise InputError(
                f"target '{checkpoint.source}': '{module}.{self.zeros}' holds the zero point 16, which 4 bits cannot "
                "hold: give a checkpoint in the format gptq_v2, or one with symmetric groups"
            )
        return scale, zero


@dataclass(frozen=True)
class _Awq(_Gptq):
    """qweight [K, N / 8], scales [K / group, N], qzeros [K / group, N / 8]; a word's codes are those of outputs 0, 2,
    4, 6, 1, 3, 5, 7 (AutoAWQ's ``WQLinear_GEMM``)."""

    order = (0, 4, 1, 5, 2, 6, 3, 7)

    def size(self, codes: tuple[int, ...]) -> tuple[int, int]:
        return codes[1] * _WORD, codes[0]

    def rows(self, checkpoint: Checkpoint, module: str, rows: slice) -> Part:
        words = slice(rows.start // _WORD, rows.stop // _WORD)
        codes = self.unpacked(checkpoint.cut(f"{module}.{self.codes}", (slice(None), words))).T
        return codes, *self._groups(checkpoint, module, rows)


@dataclass(frozen=True)
class _PackQuantized(_Format):
    """weight_packed [N, K / 8], weight_scale [N, K / group], weight_zero_point [N / 8, K / group], whose words hold
    consecutive rows (``pack_to_int32`` of compressed-tensors)."""

    def size(self, codes: tuple[int, ...]) -> tuple[int, int]:
        return codes[0], codes[1] * _WORD

    def shapes(self, outputs: int, inputs: int) -> _Shapes:
        groups = inputs // self.group
        found: _Shapes = {self.scales: (outputs, groups)}
        return found | {self.zeros: (outputs // _WORD, groups)} if self.zeros else found

    def rows(self, checkpoint: Checkpoint, module: str, rows: slice) -> Part:
        words, zero = slice(rows.start // _WORD, rows.stop // _WORD), None
        codes = self.unpacked(checkpoint.cut(f"{module}.{self.codes}", (rows,)))
        if self.zeros:
            zero = self.unpacked(checkpoint.cut(f"{module}.{self.zeros}", (words,)).T).T
        return codes, checkpoint.cut(f"{module}.{self.scales}", (rows,)), zero


def _format(config: dict[str, Any], where: str) -> _Format:
    """The format of a quantization_config. Raises InputError for those that are not supported."""
    method = config["quant_method"]

    def require(name: str, value: object, *expected: object) -> Any:
        if not any(value == one and type(value) is type(one) for one in expected):
            raise InputError(
                f"{where} is quantized by {method} with {name} {shown(value)}, expected "
                f"{' or '.join(map(repr, expected))}: give the checkpoint it was made from, and --weights int4 or int8"
            )
        return value

    if method == "compressed-tensors":
        groups = config.get("config_groups")
        named = list(groups.values()) if isinstance(groups, dict) else []
        require("groups in config_groups:", len(named), 1)
        group = named[0] if isinstance(named[0], dict) else {}
        found = group.get("weights")
        weights = found if isinstance(found, dict) else {}
        require("format", config.get("format") or group.get("format"), "pack-quantized")
        for name in ("input_activations", "output_activations"):
            require(name, group.get(name), None)
        for name in ("kv_cache_scheme", "transform_config"):
            require(name, config.get(name) or None, None)
        require("type", weights.get("type", "int"), "int")
        require("strategy", weights.get("strategy"), "group")
        symmetric = require("symmetric", weights.get("symmetric", True), True, False)
        require("num_bits", weights.get("num_bits"), 4)
        size = require("group_size", weights.get("group_size"), *_GROUPS)
        zeros = "" if symmetric else "weight_zero_point"
        return _PackQuantized(method, size, "weight_packed", "weight_scale", zeros, "weight_g_idx")
    require("bits", config.get("bits"), 4)
    size = require("group_size", config.get("group_size"), *_GROUPS)
    names = "qweight", "scales", "qzeros", "g_idx"
    if method == "awq":
        version = config.get("version", "gemm")
        require("version", version.lower() if isinstance(version, str) else version, "gemm")
        return _Awq(method, size, *names, 0)
    require("dynamic", config.get("dynamic") or None, None)  # other bits for some modules
    version = require("checkpoint_format", config.get("checkpoint_format", "gptq"), "gptq", "gptq_v2")
    return _Gptq(method, size, *names, int(version == "gptq"))


class QuantizedCheckpoint(Checkpoint):
    """A target whose matrices are codes, under the names of the matrices."""

    def __init__(self, source: str, quantization: dict[str, Any]) -> None:
        """quantization: the target's quantization_config.

        Raises InputError for formats that are not supported and missing tensors, and DamageError for tensors of another
        shape.
        """
        super().__init__(source, "target")
        self.config.pop("quantization_config", None)
        self._format = _format(quantization, f"target '{source}'")
        ending = f".{self._format.codes}"
        modules = sorted(name.removesuffix(ending) for name in self._locations if name.endswith(ending))
        if not modules:
            raise InputError(
                f"target '{source}' has no tensor named *{ending}, though its config.json says it is quantized by "
                f"{self._format.method}, which is not supported: name another checkpoint"
            )
        self._sizes = {f"{module}.weight": self._checked(module) for module in modules}
        # The zero points of symmetric groups and the shape, which that of the codes says, are not read.
        endings = {*self._format.endings(), "weight_shape", "weight_zero_point"}
        self._parts = {f"{module}.{ending}" for module in modules for ending in endings}

    def _checked(self, module: str) -> tuple[int, int]:
        """N and K of a matrix."""
        form, name = self._format, f"{module}.{self._format.codes}"

        def refuse(name: str, found: object, expected: object) -> None:
            raise DamageError(
                f"target '{self.source}': tensor '{name}' is {found}, expected {expected}: download it again"
            )

        shape = super().shape(name)
        if len(shape) != 2:
            refuse(name, list(shape), "a matrix")
        outputs, inputs = form.size(shape)
        if outputs % _WORD or inputs % form.group or f"{module}.weight" in self._locations:
            refuse(
                name,
                list(shape),
                f"whole groups of {form.group} and words of {_WORD}, and no '{module}.weight' beside it",
            )
        expected = form.shapes(outputs, inputs)
        indices = f"{module}.{form.indices}"
        if indices in self._locations:
            expected[form.indices] = (inputs,)
        for ending, size in expected.items():
            if super().shape(f"{module}.{ending}") != size:
                refuse(f"{module}.{ending}", list(super().shape(f"{module}.{ending}")), list(size))
        for ending in (form.codes, *expected):
            dtype = super().dtype(f"{module}.{ending}")
            dtypes = tuple(_SCALES) if ending == form.scales else ("I32", "torch.int32")
            if dtype not in dtypes and f"torch.{dtype}" not in dtypes:
                refuse(f"{module}.{ending}", dtype, " or ".join(dtypes))
        if form.indices in expected and not torch.equal(
            self.cut(indices, ()).long(), torch.arange(inputs) // form.group
        ):
            raise InputError(
                f"target '{self.source}' was quantized with act-order (desc_act), so that the groups of '{module}' are "
                "not consecutive: name a checkpoint without it"
            )
        return outputs, inputs

    def names(self) -> set[str]:
        return (super().names() - self._parts) | set(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sizes.get(name) or super().shape(name)

    def dtype(self, name: str) -> str:
        return self._format.method if name in self._sizes else super().dtype(name)

    def stored(self, name: str) -> Stored | None:
        return None if name in self._sizes else super().stored(name)

    def check_dtype(self, name: str) -> None:
        if name not in self._sizes:
            super().check_dtype(name)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor; the numbers that codes stand for in fp32."""
        if name not in self._sizes:
            return super().read(name, start, stop)
        outputs = self._sizes[name][0]
        start, stop = min(start, outputs), min(outputs if stop is None else stop, outputs)
        if start >= stop:
            return torch.empty(0, self._sizes[name][1])
        first = start // _WORD * _WORD
        codes, scale, zero = self._rows(name, slice(first, -(-stop // _WORD) * _WORD))
        return dequantize(codes, scale.float(), 4, zero)[start - first : stop - first]

    def coded(self, name: str) -> Coded | None:
        if name not in self._sizes:
            return None
        outputs, inputs = self._sizes[name]
        rows = max(_WORD, _SLICE_ELEMENTS // inputs // _WORD * _WORD)

        def parts() -> Iterator[Part]:
            for start in range(0, outputs, rows):
                yield self._rows(name, slice(start, min(start + rows, outputs)))

        scales = super().dtype(f"{name.removesuffix('.weight')}.{self._format.scales}")
        return Coded(4, bool(self._format.zeros), _SCALES[scales.removeprefix("torch.")], parts)

    def _rows(self, name: str, rows: slice) -> Part:
        """Codes, scales and zero points of rows in blocks of 32: those of a larger group are repeated."""
        codes, scale, zero = self._format.rows(self, name.removesuffix(".weight"), rows)
        blocks, repeats = codes.unflatten(-1, (-1, CODED_BLOCK)), self._format.group // CODED_BLOCK
        repeated = None if zero is None else pack_zeros(zero.repeat_interleave(repeats, -1))
        return pack(blocks), scale.repeat_interleave(repeats, -1), repeated
