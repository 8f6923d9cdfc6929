"""The graph of a Program: what capture returns, for constructors and for steps alike.

It is a graph in which nothing is ever changed in place. Its edges are `Value`s: the whole content of one
storage at one moment. An operation that writes into a tensor makes a new `Value` for that tensor's storage, and a
view is no operation at all: whoever reads through a view holds a `Ref`, which is a `Value` and the view's geometry
(size, stride, offset). So slices, transposes, in-place edits of views, and weights that share memory need no rules
of their own, neither here nor in the engines.

Nodes point backwards only. A write that nobody reads before the next one is unreachable, and is collected by
Python: dead fills cost nothing to skip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..compat.torch_names import OpOverload, version_of
from ..errors import ConstantChangedError
from ..rng.stream import Position, Stream
from .source import Source


class Value:
    """The whole content of one storage at one moment, as its base tensor lays it out."""

    __slots__ = ("node", "shape", "stride", "dtype", "device", "real", "version", "label", "__weakref__")

    def __init__(self, shape, stride, dtype, device, node: Node | None = None, label: str | None = None) -> None:
        self.shape: tuple[int, ...] = shape
        self.stride: tuple[int, ...] = stride
        self.dtype: torch.dtype = dtype
        self.device: torch.device = device
        self.node = node
        # The value itself, where it is known already: constants, and small values that someone has read.
        self.real: torch.Tensor | None = None
        self.version: int | None = None  # of `real`, where it is somebody else's tensor that must not be edited
        self.label = label  # for inputs: a name for people to read

    @property
    def known(self) -> bool:
        """Whether `real` has the content. Ask this rather than for `real`, which may have to read a file."""
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
        """Fresh memory, not written, that is laid out as this Value is."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)

    def read_into(self, begin: int, out: torch.Tensor) -> None:
        """Write elements from number `begin` on, as they lie in memory, of a known Value into `out`."""
        content = self.content()
        flat = content.as_strided((self.numel,), (1,), content.storage_offset())
        out.copy_(flat[begin : begin + out.numel()])

    def content(self) -> torch.Tensor:
        """The content of a known Value. Not to be written.

        Raises:
            ConstantChangedError: if it is kept by reference, and has been edited since.
        """
        real = self.real
        assert real is not None
        original: Any = getattr(real, "original", real)
        if self.version is not None and version_of(original) != self.version:
            raise ConstantChangedError(
                f"a tensor of shape {list(self.shape)} from outside the constructor was edited after it had been "
                f"captured at {self.label}; its weight would not be what eager PyTorch made. Clone it before the "
                "constructor, or materialize before editing it."
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
        """All of `value`, as it lies."""
        return cls(value, tuple(value.shape), value.stride, 0, value.dtype)

    @property
    def whole(self) -> bool:
        """Whether this is the base tensor itself: no view."""
        value = self.value
        return (
            self.offset == 0 and self.size == value.shape and self.stride == value.stride and self.dtype == value.dtype
        )

    @property
    def covers(self) -> bool:
        """Whether this shows every element of the storage once: a write through it replaces all that was there."""
        if self.whole:
            return True
        value = self.value
        return self.offset == 0 and self.dtype == value.dtype and dense_count(self.size, self.stride) == value.numel

    def as_python(self, name: str) -> str:
        """An expression for the view of the tensor called `name`, which holds the Value."""
        if self.whole:
            return name
        geometry = f"{self.size}, {self.stride}, {self.offset}"
        if self.dtype == self.value.dtype:
            return f"{name}.as_strided({geometry})"
        return f"view({name}, {geometry}, {self.dtype})"

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The view of `buffer`, which holds the Value, that this describes; writes through it reach the buffer."""
        if self.whole:
            return buffer
        begin = buffer.storage_offset()  # of memory that somebody else made it may be a part
        if self.dtype == buffer.dtype:
            return buffer.as_strided(self.size, self.stride, begin + self.offset)
        begin = begin * buffer.itemsize // self.dtype.itemsize
        out = torch.empty(0, dtype=self.dtype, device=buffer.device)
        return out.set_(buffer.untyped_storage(), begin + self.offset, self.size, self.stride)


def is_contiguous(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a geometry is row-major without gaps."""
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        if n != 1 and s != expected:
            return False
        expected *= n
    return True


def dense_count(size: Sequence[int], stride: Sequence[int]) -> int | None:
    """The number of elements of a geometry that is row-major without gaps in some order of dimensions, else None."""
    expected = 1
    for s, n in sorted(zip(stride, size, strict=True)):
        if n == 1:
            continue
        if s != expected:
            return None
        expected *= n
    return expected


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of memory from the first to the last that a geometry touches; 0 for an empty one."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


class Truncation(Protocol):
    """Bounds inside which an operation draws by rejection: what later rounds make of its first one.

    Attributes:
        low, high: the bounds, rounded to the dtype of what is drawn.
    """

    low: float
    high: float

    def correct(self, first_round: torch.Tensor, begin: int = 0) -> None:
        """Give elements from `begin` on, which hold their first round, their final content."""


class Draw(NamedTuple):
    """Where in a random stream an operation begins to draw, and where it leaves the stream."""

    stream: Stream
    position: Position
    after: Position  # of an operation by rejection: after its first round
    rejection: Truncation | None = None


class Node:
    """One ATen operation.

    `args` and `kwargs` are the operation's own, with a `Ref` in place of each tensor. `outputs` are the Values
    made: first those of the arguments that it writes to (in `writes`, each with the Ref that was written through),
    then those of newly made tensors.
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
    )

    def __init__(
        self,
        index: int,
        op: OpOverload,
        args: tuple,
        kwargs: dict[str, Any],
        writes: tuple[Ref, ...],
        overwrites: bool,
        draw: Draw | None,
        source: Source,
    ) -> None:
        self.index = index  # order of recording, over the whole process
        self.op = op
        self.args = args
        self.kwargs = kwargs
        self.writes = writes
        self.overwrites = overwrites  # the one written tensor is written whole, and its old content is not read
        self.draw = draw
        self.source = source
        self.outputs: tuple[Value, ...] = ()
        self.kind: Any = None  # see `kinds.kind_of`
        self.saved_constants: list[tuple[torch.Tensor, int]] | None = None

    def refs(self) -> Iterator[Ref]:
        """Every Ref that this node reads, in argument order (a target that is overwritten is not read)."""
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
    """The nodes that `values` need, in the order of recording; nothing behind a Value in `stop` or a known one."""
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


# How a tensor looks at its storage: size, stride, offset, dtype.
Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """How `tensor` looks at its storage."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `size`."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order of the dimensions."""
    if tensor.layout != torch.strided:
        return False
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    shape = tuple([tensor.shape[d] for d in order if tensor.shape[d] != 1])
    return tuple([tensor.stride(d) for d in order if tensor.shape[d] != 1]) == contiguous_stride(shape)
