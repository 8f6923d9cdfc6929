"""The graph of a Program, which capture records for constructors and for steps.

It is functional, in SSA form. Its edges are `Value`s: the content of a whole storage at one point in time. An in-place
operation creates a new `Value` for the storage of the tensor that it writes to. A view is not an operation: a read
through a view is a `Ref`, which is a `Value` and the view's geometry (size, stride, offset). So slices, transposes,
in-place writes to views and tied weights need no rules of their own.

Nodes only refer to earlier ones. A write that is overwritten before it is read is unreachable, and garbage-collected by
Python: this is how dead fills are eliminated.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..compat.locks import fork_safe_lock
from ..compat.torch_names import OpOverload, version_of
from ..errors import ConstantChangedError
from ..rng.stream import Position, Stream
from .source import Source


class Value:
    """The content of a whole storage at one point in time, with the layout of its base tensor."""

    __slots__ = ("node", "shape", "stride", "dtype", "device", "real", "version", "label", "__weakref__")

    def __init__(
        self,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        node: Node | None = None,
        label: str | None = None,
    ) -> None:
        self.shape: tuple[int, ...] = shape
        self.stride: tuple[int, ...] = stride
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device
        self.node: Node | None = node
        # The content, if it is known: of constants, and of small Values that have been read.
        self.real: torch.Tensor | None = None
        self.version: int | None = None  # of `real`, if it is the user's tensor, which must not be edited
        self.label: str | None = label  # a readable name, for inputs

    @property
    def known(self) -> bool:
        """Whether the content is known. Cheap, unlike `real`, which may read a file."""
        return self.real is not None

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def empty(self) -> torch.Tensor:
        """An uninitialized tensor with the layout of this Value."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def read_into(self, begin: int, out: torch.Tensor) -> None:
        """Copy the elements of a known Value from index `begin` on, in memory order, into `out`."""
        content = self.content()
        flat = content.as_strided((self.numel,), (1,), content.storage_offset())
        out.copy_(flat[begin : begin + out.numel()])

    def content(self) -> torch.Tensor:
        """The content of a known Value; must not be modified.

        Raises:
            ConstantChangedError: if it is held by reference and has been edited since.
        """
        real = self.real
        assert real is not None
        original: Any = getattr(real, "original", real)
        if self.version is not None and version_of(original) != self.version:
            raise ConstantChangedError(
                f"a tensor of shape {list(self.shape)} from outside the constructor was edited after it had been "
                f"captured at {self.label}, so the weight computed from it would differ from eager PyTorch's. Clone it "
                "before the constructor, or materialize the weight before editing it."
            )
        return real


class Ref(NamedTuple):
    """A read of a Value through a view: `size`, `stride` and `offset` in elements of `dtype`."""

    value: Value
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, value: Value) -> Ref:
        """All of `value`, without a view."""
        return cls(value, tuple(value.shape), value.stride, 0, value.dtype)

    @property
    def whole(self) -> bool:
        """Whether this is the base tensor itself."""
        value = self.value
        return (
            self.offset == 0 and self.size == value.shape and self.stride == value.stride and self.dtype == value.dtype
        )

    @property
    def covers(self) -> bool:
        """Whether a write through this view replaces every element of the storage."""
        if self.whole:
            return True
        value = self.value
        return self.offset == 0 and self.dtype == value.dtype and dense_count(self.size, self.stride) == value.numel

    def as_python(self, name: str) -> str:
        """A Python expression for this view of the tensor called `name`, which holds the Value."""
        if self.whole:
            return name
        geometry = f"{self.size}, {self.stride}, {self.offset}"
        if self.dtype == self.value.dtype:
            return f"{name}.as_strided({geometry})"
        return f"view({name}, {geometry}, {self.dtype})"

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """This view of `buffer`, a tensor that holds the Value."""
        if self.whole:
            return buffer
        begin = buffer.storage_offset()
        if self.dtype == buffer.dtype:
            return buffer.as_strided(self.size, self.stride, begin + self.offset)
        begin = begin * buffer.itemsize // self.dtype.itemsize
        out = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return out.set_(buffer.untyped_storage(), begin + self.offset, self.size, self.stride)


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether size and stride are row-major without gaps."""
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


def dense_count(size: Sequence[int], stride: Sequence[int]) -> int | None:
    """The number of elements if size and stride are without gaps in some order of dimensions; else None."""
    expected = 1
    for s, n in sorted(zip(stride, size, strict=True)):
        if n == 1:
            continue
        if s != expected:
            return None
        expected *= n
    return expected


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """The distance in elements from the first element in memory to behind the last; 0 for an empty tensor."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


class Truncation(Protocol):
    """The bounds of an operation that draws by rejection: see `engine/rejection.py`.

    Attributes:
        low, high: the bounds, rounded to the dtype of the tensor.
    """

    low: float
    high: float

    def correct(self, first_round: torch.Tensor, begin: int = 0) -> None:
        """Replace the values of the first round, in elements from `begin` on, by the final ones."""


class Draw(NamedTuple):
    """The stream position at which an operation begins to draw, and the one after it."""

    stream: Stream
    position: Position
    after: Position  # for an operation by rejection: after its first round
    rejection: Truncation | None = None


class Node:
    """One ATen operation.

    `args` and `kwargs` are those of the call, with a `Ref` in place of each tensor. `outputs` are first the new Values
    of the arguments that it writes to (`writes` has the Refs that are written through), then those of new tensors.
    """

    __slots__ = (
        "index",
        "op",
        "args",
        "kwargs",
        "writes",
        "outputs",
        "overwrites",
        "draw",
        "source",
        "kind",
        "saved_constants",
        "threads",
    )

    def __init__(
        self,
        index: int,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        writes: tuple[Ref, ...],
        overwrites: bool,
        draw: Draw | None,
        source: Source,
    ) -> None:
        self.index: int = index  # in the order of recording, within the process
        self.op: Any = op
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.writes: tuple[Ref, ...] = writes
        self.overwrites: bool = overwrites  # it writes one tensor, all of it, and does not read its old content
        self.draw: Draw | None = draw
        self.source: Source = source
        self.outputs: tuple[Value, ...] = ()
        self.kind: Any = None  # see `node_kinds.kind_of`
        self.saved_constants: list[tuple[torch.Tensor, int]] | None = None
        self.threads: int = torch.get_num_threads()  # factorizations and products have other last bits with others

    def refs(self) -> Iterator[Ref]:
        """The Refs that this node reads, in argument order; excludes a target that is overwritten."""
        skip = self.writes[0] if self.overwrites else None
        yield from _refs_in(self.args, skip)
        if self.kwargs:
            yield from _refs_in(self.kwargs.values(), skip)

    def reads(self) -> Iterator[Value]:
        """The Values of `refs`."""
        for ref in self.refs():
            yield ref.value

    def __repr__(self) -> str:
        return f"<{self.op} at {self.source}>"


def _refs_in(args: Iterable[Any], skip: Ref | None) -> Iterator[Ref]:
    for arg in args:
        if type(arg) is Ref:
            if arg is not skip:
                yield arg
        elif type(arg) in (list, tuple):
            yield from _refs_in(arg, skip)


def slice_for(values: Iterable[Value], stop: set[Value] | None = None) -> list[Node]:
    """The backward slice of `values`, in the order of recording; ends at Values in `stop` and at known ones."""
    nodes: dict[int, Node] = {}
    todo = list(values)
    while todo:
        value = todo.pop()
        node = value.node
        if node is None or value.known or node.index in nodes or (stop is not None and value in stop):
            continue
        nodes[node.index] = node
        todo.extend(node.reads())
    return [nodes[i] for i in sorted(nodes)]


# The view of a tensor on its storage: size, stride, offset, dtype.


ReadBox = Callable[[tuple[int, ...], tuple[int, ...]], torch.Tensor]
ReadRange = Callable[[int, torch.Tensor], None]
_recent: deque[torch.Tensor] = deque(maxlen=2)  # keeps the last contents of files alive, since engines read them again


class FileValue(Value):
    """A constant in a file: `read` returns its content, with the Value's layout.

    Attributes:
        origin: what tells its content apart from any other without reading it, if something does: the file's path, size
            and time, and the place in it.
    """

    __slots__ = ("origin", "_read", "_read_box", "_read_range", "_follows", "_weak", "_lock")

    def __init__(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
        label: str,
        read_box: ReadBox | None = None,
    ) -> None:
        self.origin: tuple[object, ...] | None = None
        self._read = read
        self._read_box = read_box
        self._read_range: ReadRange | None = None
        self._follows: tuple[torch.Tensor, int] | None = None
        self._weak: Callable[[], torch.Tensor | None] = lambda: None
        self._lock = fork_safe_lock()
        super().__init__(tuple(shape), tuple(stride), dtype, torch.device("cpu"), label=label)

    @classmethod
    def read_by_range(
        cls, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, read_range: ReadRange, label: str
    ) -> FileValue:
        """A contiguous FileValue of which `read_range(begin, out)` reads any range into existing memory."""

        def read() -> torch.Tensor:
            self._check()
            out = torch.empty(shape, dtype=dtype)
            read_range(0, out.view(-1))
            return out

        self = cls(shape, stride, dtype, read, label)
        self._read_range = read_range
        return self

    @property
    def known(self) -> bool:
        """Always True."""
        return True

    @property
    def real(self) -> torch.Tensor:
        """The content; must not be modified."""
        with self._lock:
            tensor = self._weak()
            if tensor is None:
                tensor = self._read()
                self._weak = weakref.ref(tensor)
                _recent.append(tensor)
            return tensor

    @real.setter
    def real(self, tensor: torch.Tensor | None) -> None:
        assert tensor is None  # the base class initializes it

    def box(self, begin: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A part of the content; the rest is not read if possible."""
        if self._read_box is not None and self._weak() is None:
            return self._read_box(begin, shape)
        if self._read_range is not None and self._weak() is None and shape:
            rows = torch.empty((shape[0], *self.shape[1:]), dtype=self.dtype)
            self._read_range(begin[0] * math.prod(self.shape[1:]), rows.view(-1))
            return rows[(slice(None), *(slice(b, b + n) for b, n in zip(begin[1:], shape[1:], strict=True)))]
        return self.real[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]

    def follow(self, tensor: torch.Tensor) -> None:
        """Raise an error on reads after `tensor`, whose memory eager PyTorch would share, has been edited."""
        self._follows = tensor, version_of(tensor)

    def _check(self) -> None:
        if self._follows is not None and version_of(self._follows[0]) != self._follows[1]:
            raise ConstantChangedError(
                f"a checkpoint's tensor of shape {list(self.shape)} ({self.label}) was edited after a parameter had "
                "been created from it in a deferred block. Edit it before, or edit the parameter."
            )

    def read_into(self, begin: int, out: torch.Tensor) -> None:
        """As `Value.read_into`, directly from the file."""
        self._check()
        if self._read_range is None or self._weak() is not None:
            super().read_into(begin, out)
        else:
            self._read_range(begin, out)


Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def is_not_strided(tensor: torch.Tensor) -> bool:
    """Whether a tensor is sparse, nested, quantized or similar; such tensors are never deferred."""
    return tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized


def layout_name(tensor: torch.Tensor) -> str:
    """What `tensor` is, if it is not strided: "sparse_coo", for example, or "nested"."""
    return "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)[len("torch.") :]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """The size, stride, offset and dtype of `tensor`."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of this size."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix "torch."."""
    return str(dtype).removeprefix("torch.")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is non-overlapping and dense: contiguous in some order of dimensions."""
    if tensor.layout != torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    shape = tuple([tensor.shape[d] for d in order if tensor.shape[d] != 1])
    return tuple([tensor.stride(d) for d in order if tensor.shape[d] != 1]) == contiguous_stride(shape)


def is_number_type(argument_type: Any) -> bool:
    """Whether a schema argument of this type is a number or a list of numbers."""
    text = str(argument_type)
    return any(name in text for name in ("number", "Scalar", "float", "int")) and "Tensor" not in text
