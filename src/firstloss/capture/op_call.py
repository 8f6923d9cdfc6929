"""A call of an ATen operation: the traits of its overload, and the tensors among its arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]
from torch.ops import aten

from ..compat.torch_names import OpOverload, can_decompose, schema_of, version_of
from ..errors import CaptureError, TraceError
from ..program.graph import Geometry, Ref, geometry_of, layout_name
from ..program.node_kinds import replaces_target
from ..program.source import here
from . import session
from .constants import constant
from .exported_memory import storage_at
from .input_numbers import InputFloat, InputInt
from .tensor import DeferredStorage, DeferredTensor, Hooks

Tensor = torch.Tensor
_SYMBOLIC = frozenset({torch.SymFloat, torch.SymInt, InputFloat, InputInt})

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


# Views that are not annotated as such in their schema.
_UNANNOTATED_VIEWS = frozenset(
    {
        aten._unsafe_view.default,
        aten._reshape_alias.default,
        aten.unsafe_split.Tensor,
        aten.unsafe_split_with_sizes.default,
    }
)

# Views according to the schema, whose result has a lazy conjugate or negative bit, which a geometry cannot express:
# recorded as the operations that compute it.
_LAZY_BITS = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}

# Namespaces whose operations draw random numbers only if their schema says so.
_KNOWN_NAMESPACES = frozenset({"aten", "prims", "prim", "firstloss", "quantized", "torchvision"})


class Traits(NamedTuple):
    """Properties of an ATen overload.

    Attributes:
        writes: positions (int) or keywords (str) of the arguments that it writes to.
        returns: for each return value the entry of `writes` that it aliases, or None for a new tensor.
        fill: whether it overwrites its only target without reading it.
        arguments: the names of its arguments.
        is_foreach: whether it is a foreach operation, on lists of tensors.
        returns_one: whether it returns one tensor, rather than a list or tuple of them.
        no_tensors: whether it neither takes nor returns tensors, as `promote_types` and the profiler's operations.
    """

    view: bool
    writes: tuple[int | str, ...]
    returns: tuple[int | str | None, ...]
    fill: bool
    out: bool  # an out= overload, which resizes its targets
    random: str | None  # the name for `words_drawn.draw`, if it is random
    generator: int | None  # the position of a positional `generator` argument
    replacement: OpOverload | None  # records a lazy conjugation or negation
    opaque: bool  # a custom operation, which may draw and may lack a meta kernel
    namespace: str
    arguments: tuple[str, ...]
    is_foreach: bool
    returns_one: bool
    no_tensors: bool


@functools.cache
def traits_of(op: OpOverload) -> Traits:
    """The traits of `op`."""
    schema = schema_of(op)
    writes: list[int | str] = []
    by_alias: dict[str, int | str] = {}
    generator = None
    for i, arg in enumerate(schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            position: int | str = arg.name if arg.kwarg_only else i
            writes.append(position)
            for name in arg.alias_info.before_set:
                by_alias[name] = position
        if arg.name == "generator" and not arg.kwarg_only:
            generator = i
    returns: list[int | str | None] = []
    view = op in _UNANNOTATED_VIEWS
    for ret in schema.returns:
        info = ret.alias_info
        if info is None:
            returns.append(None)
        elif info.is_write:
            returns.append(next(by_alias[name] for name in info.before_set))
        else:
            returns.append(None)
            view = True
    replacement = _LAZY_BITS.get(op)
    base = schema.name.split("::")[1]
    # Some random operations, such as binomial, are not tagged.
    draws = torch.Tag.nondeterministic_seeded in op.tags or any(arg.name == "generator" for arg in schema.arguments)
    random = base.rstrip("_") if draws else None
    fill = replaces_target(op) and len(writes) == 1
    return Traits(
        view and not writes and replacement is None,
        tuple(writes),
        tuple(returns),
        fill,
        bool(writes) and all(isinstance(position, str) for position in writes),
        random,
        generator,
        replacement,
        op.namespace not in _KNOWN_NAMESPACES,
        op.namespace,
        tuple(arg.name for arg in schema.arguments),
        schema.name.startswith("aten::_foreach_"),
        len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.TensorType),
        not any("Tensor" in str(part.type) for part in (*schema.arguments, *schema.returns)),
    )


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch decomposes `op` above the dispatcher's autograd keys, which `torch.inference_mode` switches off:
    there such operations (`to`, `linear`, `reshape`) arrive whole."""
    return can_decompose(op)()


class OpCall:
    """A call of an ATen operation.

    Attributes:
        deferred, real: its deferred and real tensors, in argument order.
        key: everything that the shape of its result may depend on; hashable if the arguments are.
        on_meta: whether it requests a result on the meta device.
        symbolic: whether an argument is a number that is not known until the step runs.
    """

    __slots__ = ("op", "traits", "args", "kwargs", "deferred", "real", "key", "on_meta", "symbolic", "_written")

    def __init__(self, op: OpOverload, traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op: Any = op
        self.traits: Traits = traits
        self.args: tuple[Any, ...] = args
        self.kwargs: dict[str, Any] = kwargs
        self.deferred: list[DeferredTensor] = []
        self.real: list[Tensor] = []
        self.on_meta: bool = False
        self.symbolic: bool = False
        self._written: list[Tensor] | None = None
        key: list[Any] = [op]
        self._scan(args, key)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                if name == "device" and value is not None and torch.device(value).type == "meta":
                    self.on_meta = True
                self._scan((value,), key)
        self.key: tuple[Any, ...] = tuple(key)

    def _scan(self, args, key: list[Any]) -> None:
        for arg in args:
            kind = type(arg)
            if kind is DeferredTensor:
                self.deferred.append(arg)
                key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype))
            elif kind is list or kind is tuple:
                key.append(len(arg))
                self._scan(arg, key)
            elif isinstance(arg, Tensor):
                self.real.append(arg)
                if isinstance(arg, UninitializedTensorMixin):  # has no shape
                    continue
                if arg.layout in _COMPRESSED:
                    raise CaptureError(
                        f"{here()}: {self.op} is called with a tensor of layout {arg.layout} and a deferred one, which "
                        "is not supported. Pass a dense tensor (`.to_dense()`)."
                    )
                if arg.is_nested:  # has no sizes
                    key.append(arg.layout)
                    continue
                key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype))
            else:
                key.append(kind)
                if kind in _SYMBOLIC:
                    self.symbolic = True
                else:
                    key.append(arg)

    def refuse_layout(self, tensor: Tensor) -> NoReturn:
        """Raise because `tensor`, an operand or a result, is sparse or similar, which compiled steps do not support."""
        raise TraceError(
            f"{here()}: the step computes with a tensor of the layout {layout_name(tensor)} ({self.op}), but a "
            "compiled step takes dense tensors. Make it dense, by `.to_dense()`, `.to_padded_tensor(0.0)` or "
            "`.dequantize()`."
        )

    def tensors(self) -> list[Tensor]:
        """Its tensors, deferred ones first."""
        return [*self.deferred, *self.real]

    def written(self) -> list[Tensor]:
        """The tensors that the call writes to; the list must not be modified."""
        if self._written is not None:
            return self._written
        out: list[Tensor] = []
        for position in self.traits.writes:
            arg = self.argument(position)
            if isinstance(arg, (list, tuple)):
                out.extend(arg)
            elif arg is not None:
                out.append(arg)
        self._written = out
        return out

    @property
    def is_foreach(self) -> bool:
        """Whether it is a foreach operation, on lists of tensors."""
        return self.traits.is_foreach and bool(self.args) and type(self.args[0]) in (list, tuple)

    def argument(self, position: int | str) -> Any:
        """The argument at a position or of a keyword; None if it was not given."""
        if isinstance(position, str):
            return self.kwargs.get(position)
        return self.args[position] if position < len(self.args) else None

    def generator_argument(self) -> torch.Generator | None:
        """The `generator` argument of the call."""
        generator = self.kwargs.get("generator")
        if generator is None and self.traits.generator is not None and self.traits.generator < len(self.args):
            generator = self.args[self.traits.generator]
        return generator

    def generator(self) -> torch.Generator:
        """The generator that the call draws from; the default one of the CPU if none is given."""
        argument = self.generator_argument()
        return torch.default_generator if argument is None else argument

    def device(self) -> torch.device:
        """The device of the result."""
        device = self.kwargs.get("device")
        if device is not None:
            return torch.device(device)
        best = None
        for t in (*self.deferred, *self.real):
            if best is None or (t.dim() > 0 and best.dim() == 0):
                best = t
        return best.device if best is not None else torch.device("cpu")

    def plain_arguments(self) -> dict[str, Any]:
        """The numeric arguments by name, and the dtypes of tensor arguments: the `op_args` of `words_drawn.draw`."""
        out: dict[str, Any] = {}
        for name, arg in zip(self.traits.arguments, self.args, strict=False):
            out[name] = arg
        out.update(self.kwargs)
        out.pop("generator", None)
        plain: dict[str, Any] = {}
        for name, arg in out.items():
            if isinstance(arg, Tensor):
                plain[f"{name}_dtype"] = str(arg.dtype).removeprefix("torch.")
            elif isinstance(arg, (int, float, bool)):
                plain["from_" if name == "from" else name] = arg
        return plain


def views(call: OpCall, storage: DeferredStorage, geometry: Iterable[Geometry]) -> Any:
    """The results of a view operation, of `storage`; those that autograd takes for new tensors are wrapped as such."""
    viewed = call.tensors()[0]
    is_new = call.op in _UNANNOTATED_VIEWS or viewed.is_inference()
    version = None if is_new else version_of(viewed)
    results = [DeferredTensor.wrap(storage, *g, new=is_new, version=version) for g in geometry]
    return results[0] if call.traits.returns_one else results


def is_symbolic(arg: Any) -> bool:
    """Whether `arg` is a symbolic number."""
    return type(arg) in _SYMBOLIC


def storage_of(tensor: Tensor) -> DeferredStorage:
    """The DeferredStorage of a tensor; for a real tensor, a new one with its current content, or a step's input."""
    if type(tensor) is DeferredTensor:
        return tensor._storage
    if session.trace is not None:
        if tensor.is_conj() or tensor.is_neg():
            session.trace.record_external(tensor)
            return Hooks.mirror_of(tensor)
        aliased = storage_at(tensor)
        if aliased is not None:  # it shares a weight's memory, by NumPy or DLPack
            if aliased[0].trace is not session.trace:
                session.trace.adopt(aliased[0])
            session.trace.record_external(tensor)
            session.trace.aliased_storages.add(aliased[0])
            return aliased[0]
        return session.trace.adopt_real(tensor)
    return DeferredStorage(constant(tensor))


def outer_geometry(tensor: Tensor) -> Geometry:
    """The geometry of a real tensor from outside a step in its `storage_of`."""
    aliased = storage_at(tensor)
    return geometry_of(tensor) if aliased is None else aliased[1]


def ref_of(tensor: Tensor) -> Ref:
    """The Ref of a tensor: its view of the current Value of its DeferredStorage."""
    if type(tensor) is DeferredTensor:
        return tensor._ref()
    value = storage_of(tensor).value
    if session.trace is not None:
        return Ref(value, *outer_geometry(tensor))
    return Ref(value, tuple(tensor.shape), value.stride, 0, value.dtype)
