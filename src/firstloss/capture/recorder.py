"""The recorder: every ATen operation on a deferred tensor ends here, and becomes a node of the Program.

A deferred tensor is a geometry and a `Store`; the Store stands for a storage and knows the `Value` that it holds
now. Recording an operation is: find its arguments' Values, work out the shapes of what it returns, make a `Node`,
give the written Stores their new Values. Nothing is computed.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch._ops import OpOverload

from ..errors import CaptureError, TraceError
from ..rng import draws
from ..rng.stream import Position
from . import replay
from .generators import Generators
from .program import Draw, Node, Ref, Value, is_contiguous
from .source import here
from .traits import Traits, traits

aten = torch.ops.aten
Tensor = torch.Tensor

_counter = itertools.count()

# Constants up to this size are copied when they are captured; larger ones are kept by reference where torch can tell
# us that they were edited meanwhile, since copying a checkpoint would cost as much as reading it.
_COPY_CONSTANT_BYTES = 1 << 20


class Store:
    """What stands for one storage: the Value it holds now, and the deferred tensors that share it."""

    __slots__ = ("value", "tensors", "fills", "resident", "trace", "first", "__weakref__")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.first = value  # what it held first, but for memory that was never written
        self.tensors: list[weakref.ref] = []
        self.fills = 0  # whole fills so far: all but the last are dead
        self.resident: Any = None  # on a backend: its cell, which owns the value from then on
        self.trace: Any = None  # the step trace that has taken it up

    def alive(self) -> list[DeferredTensor]:
        """The tensors that share this storage and still exist."""
        found = [t for t in (ref() for ref in self.tensors) if t is not None and t._store is self]
        self.tensors = [weakref.ref(t) for t in found]
        return found


class DeferredTensor(Tensor):
    """A tensor with shape, dtype, device and history, and no memory."""

    _store: Store

    # What torch would do before it dispatches is right for us too.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def wrap(store: Store, size, stride, offset: int, dtype: torch.dtype) -> DeferredTensor:
        """A new tensor that looks at `store`."""
        self = Tensor._make_wrapper_subclass(
            DeferredTensor,
            size,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=store.value.device,
        )
        self._store = store
        store.tensors.append(weakref.ref(self))
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    def _ref(self) -> Ref:
        return Ref(self._store.value, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype)

    @property
    def data(self) -> Tensor:
        """As `torch.Tensor.data`; assigning shares the other tensor's storage."""
        return Tensor.data.__get__(self)

    @data.setter
    def data(self, other: Tensor) -> None:
        if not isinstance(other, DeferredTensor):
            other = constant_tensor(other)
        Tensor.data.__set__(self, other)
        self._store = other._store
        other._store.tensors.append(weakref.ref(self))

    def untyped_storage(self):
        """A storage without memory; the same object for all tensors that share one."""
        raise CaptureError(
            f"{here()}: a deferred tensor has no storage yet. Call firstloss.materialize_tensor(tensor) first."
        )

    def __deepcopy__(self, memo):
        if id(self) in memo:
            return memo[id(self)]
        store = self._store
        key = ("firstloss.store", id(store))
        if key not in memo:
            base = DeferredTensor.wrap(store, store.value.shape, store.value.stride, 0, store.value.dtype)
            with torch.no_grad():
                memo[key] = base.clone()
        copied = memo[key]._store
        out: Any = DeferredTensor.wrap(copied, tuple(self.shape), self.stride(), self.storage_offset(), self.dtype)
        extra = {k: v for k, v in self.__dict__.items() if k != "_store"}
        memo[id(self)] = out
        if extra:
            import copy

            out.__dict__.update(copy.deepcopy(extra, memo))
        out.requires_grad_(self.requires_grad)
        return out

    # Whoever takes hold of the memory itself gets a real tensor: this one, materialized in place.
    def numpy(self, *args, **kwargs):
        """As `torch.Tensor.numpy`, on the materialized tensor."""
        return _made(self).numpy(*args, **kwargs)

    def __array__(self, *args, **kwargs):
        return _made(self).__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        """As `torch.Tensor.data_ptr`, on the materialized tensor."""
        return _made(self).data_ptr()

    def tolist(self):
        """As `torch.Tensor.tolist`: computes just what this tensor needs."""
        return value_of(self).tolist()

    def __reduce_ex__(self, protocol):
        return _made(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents=None):
        if isinstance(_trace, _Tracing):
            return f"<traced tensor: {list(self.shape)} {self.dtype}>"
        real = value_of(self)
        return repr(torch.nn.Parameter(real, self.requires_grad) if getattr(self, "_is_param", False) else real)

    def __format__(self, spec):
        return format(value_of(self), spec)


class _Tracing:
    """What the recorder needs of a step trace (`step.py`): see there."""

    def adopt(self, store: Store) -> None: ...

    def adopt_real(self, tensor: Tensor) -> Store: ...

    def refuse_read(self, op: OpOverload) -> None: ...

    def key_draw(self, node: Node) -> None: ...


_trace: _Tracing | None = None
_depth = 0  # how many `deferred` contexts are open
generators = Generators()
_constants: dict[int, tuple[Tensor, int, Value]] = {}


def value_of(tensor: DeferredTensor) -> Tensor:
    """The real content of `tensor`, in memory of its own; the tensor stays deferred."""
    if _trace is not None:
        _trace.refuse_read(aten._local_scalar_dense.default)
    store = tensor._store
    if store.resident is not None:
        return look_resident(tensor).clone()
    _check_kept(tensor)
    with torch._C._DisableTorchDispatch():
        return replay.compute([tensor._ref()])[0]


def _check_kept(tensor: DeferredTensor) -> None:
    """A tensor that a traced step made, and that was neither returned nor kept as state, has no value."""
    store = tensor._store
    if store.trace is not None and store.resident is None and store.value.real is None:
        raise TraceError(
            f"{here()}: this tensor was made inside a traced step, which did not return it, so its value was not kept. "
            "Return it from the step, or keep it in a module's buffer or an optimizer's state."
        )


def look_resident(tensor: DeferredTensor) -> Tensor:
    """The real content of a tensor that lives on a backend, as a view of one copy on the host."""
    return replay.look(tensor._store.resident.host(), tensor._ref())


_materialize: Any = None


def set_materializer(materialize: Any) -> None:
    """How a tensor is made real when somebody takes hold of its memory: given by `init/`, which capture may not know."""
    global _materialize
    _materialize = materialize


def _made(tensor: DeferredTensor) -> Tensor:
    if _trace is not None:
        _trace.refuse_read(aten._local_scalar_dense.default)
    if tensor._store.resident is not None:
        return value_of(tensor)
    assert _materialize is not None
    return _materialize(tensor)


# -- the way in ------------------------------------------------------------------------------------------------------


def dispatch(op: OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What `op` returns on `args`: recorded where it can be, run where somebody reads a value."""
    handler = _SPECIAL.get(op)
    if handler is not None:
        return handler(op, args, kwargs)
    if op.namespace == "profiler":
        return op(*args, **kwargs)
    how = traits(op)
    if how.replacement is not None:
        return dispatch(how.replacement, args, kwargs)
    call = _Call(op, how, args, kwargs)
    if _trace is None:
        for tensor in call.deferred:
            if tensor._store.trace is not None:
                _check_kept(tensor)
        if not call.deferred and (call.real or call.on_meta):
            return _run_for_real(call)
        if any(t._store.resident is not None for t in call.deferred):
            return _run_on_resident(call)
        if how.writes and any(isinstance(t, Tensor) and not isinstance(t, DeferredTensor) for t in call.written()):
            return _run_for_real(call)
    return _record(call)


class _Call:
    """One call, its tensors found."""

    __slots__ = ("op", "traits", "args", "kwargs", "deferred", "real", "key", "on_meta")

    def __init__(self, op: OpOverload, how: Traits, args: tuple, kwargs: dict[str, Any]) -> None:
        self.op = op
        self.traits = how
        self.args = args
        self.kwargs = kwargs
        self.deferred: list[DeferredTensor] = []
        self.real: list[Tensor] = []
        self.on_meta = False
        key: list[Any] = [op]
        self._scan(args, key)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                if name == "device" and value is not None and torch.device(value).type == "meta":
                    self.on_meta = True
                self._scan((value,), key)
        self.key = tuple(key)

    def _scan(self, args, key: list) -> None:
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
                key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype))
            else:
                key.append(kind)
                key.append(arg)

    def written(self) -> list[Tensor]:
        """The tensors that the call writes to."""
        out: list[Tensor] = []
        for where in self.traits.writes:
            if isinstance(where, str):
                arg = self.kwargs.get(where)
            else:
                arg = self.args[where] if where < len(self.args) else None
            if isinstance(arg, (list, tuple)):
                out.extend(arg)
            elif arg is not None:
                out.append(arg)
        return out

    def generator(self) -> torch.Generator:
        """The generator that the call draws from."""
        found = self.kwargs.get("generator")
        if found is None and self.traits.generator is not None and self.traits.generator < len(self.args):
            found = self.args[self.traits.generator]
        return torch.default_generator if found is None else found


# -- recording -------------------------------------------------------------------------------------------------------

_EMPTY = (aten.empty.memory_format, aten.empty_strided.default)

Geometry = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]
_shapes: dict[tuple, list[Geometry] | None] = {}


def _record(call: _Call) -> Any:
    how = call.traits
    trace = _trace
    if trace is not None:
        for t in call.deferred:
            if t._store.trace is not trace:
                trace.adopt(t._store)
    geometry = None
    if not how.fill:
        try:
            geometry = _infer(call)
        except _NeedsValues as why:
            if trace is not None:
                trace.refuse_read(call.op)
            return _run_to_find_out(call, why)
    if how.view:
        assert geometry is not None
        (base, *_) = call.deferred or [None]
        store = base._store if base is not None else _store_of(call.real[0])
        views = [DeferredTensor.wrap(store, *g) for g in geometry]
        return views[0] if _returns_one(call.op) else views

    source = here()
    targets = call.written()
    writes = tuple(_ref_of(t) for t in targets)
    overwrites = how.fill and len(writes) == 1 and writes[0].covers
    node_args = _with_refs(call.args, writes)
    node_kwargs = {k: _with_ref(v, writes) for k, v in call.kwargs.items()} if call.kwargs else call.kwargs
    node = Node(next(_counter), call.op, node_args, node_kwargs, writes, overwrites, None, source)

    if how.random is not None and _draws(call):
        if trace is not None:
            trace.key_draw(node)
        elif not _record_draw(call, node, writes, geometry):
            return _run_to_find_out(call, None)
        node.args = tuple(None if isinstance(a, torch.Generator) else a for a in node.args)
        if "generator" in node.kwargs:
            node.kwargs = {**node.kwargs, "generator": None}

    outputs: list[Value] = []
    for t, ref in zip(targets, writes, strict=True):
        old = ref.value
        new = Value(old.shape, old.stride, old.dtype, old.device, node)
        store = _store_of(t)
        store.value = new
        if overwrites:
            store.fills += 1
            if store.first is old and old.node is not None and old.node.op in _EMPTY:
                store.first = new
        outputs.append(new)
    made: list[DeferredTensor | None] = []
    if geometry is not None and not all(r is not None for r in how.returns):
        device = _device_of(call)
        for one in geometry[sum(r is not None for r in how.returns) :]:
            if one is None:
                made.append(None)
                continue
            size, stride, offset, dtype = one
            value = Value(size, stride, dtype, device, node)
            store = Store(value)
            store.trace = trace
            made.append(DeferredTensor.wrap(store, size, stride, offset, dtype))
            outputs.append(value)
    node.outputs = tuple(outputs)
    return _results(call, made)


def _results(call: _Call, made: list[DeferredTensor | None]) -> Any:
    returns = call.traits.returns
    if not returns:
        return None
    if len(returns) == 1:
        only = returns[0]
        if only is None:
            return made[0] if _returns_one(call.op) else made
        return call.kwargs[only] if isinstance(only, str) else call.args[only]
    fresh = iter(made)
    out = []
    for where in returns:
        if where is None:
            out.append(next(fresh, None))
        else:
            out.append(call.kwargs[where] if isinstance(where, str) else call.args[where])
    return tuple(out)


def _returns_one(op: OpOverload) -> bool:
    return len(op._schema.returns) == 1 and isinstance(op._schema.returns[0].type, torch.TensorType)


def _with_refs(args, writes: tuple[Ref, ...]) -> tuple:
    return tuple(_with_ref(a, writes) for a in args)


def _with_ref(arg: Any, writes: tuple[Ref, ...]) -> Any:
    if isinstance(arg, Tensor):
        ref = _ref_of(arg)
        for w in writes:  # the written arguments have to be the very same Refs, so that a fill's target is known
            if w == ref:
                return w
        return ref
    if type(arg) in (list, tuple):
        return tuple(_with_ref(a, writes) for a in arg)
    return arg


def _ref_of(tensor: Tensor) -> Ref:
    if type(tensor) is DeferredTensor:
        return tensor._ref()
    store = _store_of(tensor)
    return Ref(store.value, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)


def _store_of(tensor: Tensor) -> Store:
    if type(tensor) is DeferredTensor:
        return tensor._store
    if _trace is not None:
        return _trace.adopt_real(tensor)
    return Store(constant(tensor))


def _device_of(call: _Call) -> torch.device:
    device = call.kwargs.get("device")
    if device is not None:
        return torch.device(device)
    best = None
    for t in itertools.chain(call.deferred, call.real):
        if best is None or (t.dim() > 0 and best.dim() == 0):
            best = t
    return best.device if best is not None else torch.device("cpu")


class _NeedsValues(Exception):
    """The shape of the result, or whether there is one, depends on values."""


def _infer(call: _Call) -> list[Any]:
    try:
        known = _shapes.get(call.key)
    except TypeError:  # something in the call cannot be hashed
        return _infer_on_meta(call)
    if known is None:
        known = _infer_on_meta(call)
        if len(_shapes) > 100_000:
            _shapes.clear()
        _shapes[call.key] = known
    return known


def _infer_on_meta(call: _Call) -> list[Any]:
    """The geometry of what the call returns, found by running it on tensors without data."""

    def as_meta(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            out = torch.empty(0, dtype=arg.dtype, device="meta")
            extent = arg.storage_offset() + 1
            for size, stride in zip(arg.shape, arg.stride(), strict=True):
                extent += (size - 1) * stride if size else 0
            base = torch.empty(max(extent, 0), dtype=arg.dtype, device="meta")
            out = base.as_strided(arg.shape, arg.stride(), arg.storage_offset())
            return out
        if type(arg) in (list, tuple):
            return type(arg)(as_meta(a) for a in arg)
        if isinstance(arg, torch.Generator):
            return None
        if isinstance(arg, torch.device):
            return torch.device("meta")
        return arg

    args = [as_meta(a) for a in call.args]
    kwargs = {k: as_meta(v) for k, v in call.kwargs.items()}
    has_device = any(a.name == "device" for a in call.op._schema.arguments)
    if has_device and (not (call.deferred or call.real) or kwargs.get("device") is not None):
        kwargs["device"] = torch.device("meta")
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    try:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            result = call.op(*args, **kwargs)
    except NotImplementedError as error:
        raise _NeedsValues(str(error)) from None
    except RuntimeError as error:
        if "meta" in str(error).lower() and "tensor" in str(error).lower():
            raise _NeedsValues(str(error)) from None
        raise
    if isinstance(result, Tensor):
        result = (result,)
    elif result is None:
        result = ()
    elif not isinstance(result, (list, tuple)):
        raise _NeedsValues(f"{call.op} returns a {type(result).__name__}")
    out: list[Geometry | None] = []
    for t in result:
        if isinstance(t, (list, tuple)):
            raise CaptureError(f"{here()}: {call.op} returns lists within lists, which capture does not support")
        if t is None:  # a gradient that was not asked for
            out.append(None)
            continue
        if not isinstance(t, Tensor):
            raise _NeedsValues(f"{call.op} returns a {type(t).__name__}")
        out.append((tuple(t.shape), t.stride(), t.storage_offset(), t.dtype))
    return out


def _record_draw(call: _Call, node: Node, writes: tuple[Ref, ...], geometry: list[Geometry] | None) -> bool:
    """Give `node` its stream position and move the generator on; False if how far cannot be said."""
    if writes:
        target = writes[0]
        size, dtype = target.size, target.dtype
        dense = is_contiguous(target.size, target.stride)
    elif geometry:
        size, stride, _, dtype = geometry[0]
        dense = is_contiguous(size, stride)
    else:
        return False
    generator = call.generator()
    device = _device_of(call) if not writes else writes[0].value.device
    if device.type != "cpu" or generator.device.type != "cpu":
        raise CaptureError(
            f"{node.source}: {call.op} draws on device '{device}'. Random operations are captured on the CPU's "
            "stream: construct under the CPU device and move the model after it has been materialized."
        )
    count = 1
    for n in size:
        count *= n
    stream, position = generators.where(generator)
    drawn = draws.draw(
        call.traits.random or "",
        str(dtype).removeprefix("torch."),
        count,
        contiguous=dense,
        spare=position.spare is not None,
        **_plain_arguments(call),
    )
    if drawn is None:
        return False
    after = draws.advance(position, drawn)
    node.draw = Draw(stream, position, after)
    generators.move(generator, stream, after)
    if not _depth:
        generators.settle()
    return True


def _draws(call: _Call) -> bool:
    """Whether the call draws at all: attention does only if it drops out."""
    return (
        not call.op._schema.name.startswith("aten::_scaled_dot_product")
        or _plain_arguments(call).get("dropout_p", 0.0) != 0.0
    )


def _plain_arguments(call: _Call) -> dict[str, Any]:
    """The call's arguments by name, without tensors' contents: what a rule of words drawn may depend on."""
    out: dict[str, Any] = {}
    for spec, arg in zip(call.op._schema.arguments, call.args, strict=False):
        out[spec.name] = arg
    out.update(call.kwargs)
    out.pop("generator", None)
    plain: dict[str, Any] = {}
    for name, arg in out.items():
        if isinstance(arg, Tensor):
            plain[f"{name}_dtype"] = str(arg.dtype).removeprefix("torch.")
        elif isinstance(arg, (int, float, bool)):
            plain["from_" if name == "from" else name] = arg
    return plain


# -- running for real ------------------------------------------------------------------------------------------------


def _run_for_real(call: _Call) -> Any:
    """No deferred tensor is written: compute, as eager PyTorch would; deferred arguments are computed first."""
    if call.traits.random is not None and not call.on_meta:
        return _draw_for_real(call, call.args, call.kwargs)
    args, kwargs = _real_arguments(call)
    with torch._C._DisableTorchDispatch():
        return call.op(*args, **kwargs)


def _draw_for_real(call: _Call, args: Any, kwargs: dict) -> Any:
    generator = call.generator()
    generators.load(generator)
    with torch._C._DisableTorchDispatch():
        return call.op(*args, **kwargs)


def _real_arguments(call: _Call) -> tuple[Any, dict[str, Any]]:
    refs: list[Ref] = [t._ref() for t in call.deferred if t._store.resident is None]
    with torch._C._DisableTorchDispatch():
        real = iter(replay.compute(refs)) if refs else iter(())

        def made(arg: Any) -> Any:
            if type(arg) is DeferredTensor:
                return look_resident(arg) if arg._store.resident is not None else next(real)
            if type(arg) in (list, tuple):
                return [made(a) for a in arg]
            return arg

        args = [made(a) for a in call.args]
        kwargs = {k: made(v) for k, v in call.kwargs.items()}
    return args, kwargs


def _run_to_find_out(call: _Call, why: _NeedsValues | None) -> Any:
    """Shapes, scalars or the way a stream goes on depend on values: compute this one call now."""
    args, kwargs = _real_arguments(call)
    written = call.written()
    if written:  # the values were computed on memory of our own; what is written there becomes the new content
        results = _call_real(call, args, kwargs)
        for t, position in zip(written, call.traits.writes, strict=False):
            new = kwargs[position] if isinstance(position, str) else args[position]
            store = _store_of(t)
            base = torch.empty_strided(store.value.shape, store.value.stride, dtype=store.value.dtype)
            with torch._C._DisableTorchDispatch():
                whole = replay.compute([_whole(store.value)])[0]
                base.copy_(whole)
                replay.look(base, t._ref() if type(t) is DeferredTensor else _ref_of(t)).copy_(new)
            store.value = constant(base, copy=False)
        del results
        where = call.traits.returns[0] if call.traits.returns else None
        if where is None:
            return None
        return call.kwargs[where] if isinstance(where, str) else call.args[where]
    result = _call_real(call, args, kwargs)
    if isinstance(result, Tensor):
        return constant_tensor(result, copy=False)
    if isinstance(result, (list, tuple)):
        return type(result)(constant_tensor(r, copy=False) if isinstance(r, Tensor) else r for r in result)
    return result


def _call_real(call: _Call, args: Any, kwargs: dict) -> Any:
    if call.traits.random is not None:
        result = _draw_for_real(call, args, kwargs)
        return result
    with torch._C._DisableTorchDispatch():
        return call.op(*args, **kwargs)


def _whole(value: Value) -> Ref:
    return Ref(value, value.shape, value.stride, 0, value.dtype)


def _run_on_resident(call: _Call) -> Any:
    """Eager work on weights that live on a backend: views stay views, the rest is computed on the host."""
    if call.traits.view:
        geometry = _infer(call)
        views = [DeferredTensor.wrap(call.deferred[0]._store, *g) for g in geometry]
        return views[0] if _returns_one(call.op) else views
    targets = [t for t in call.written() if type(t) is DeferredTensor]
    for t in targets:
        if t._store.resident is None:
            raise CaptureError(
                f"{here()}: {call.op} writes to a tensor that is still deferred, from one that lives on a backend. "
                "Call firstloss.materialize_tensor on the first."
            )
        t._store.resident.edit()  # from here on its host copy may be written, and goes back before the next step
    result = _call_real(call, *_real_arguments(call))
    for where in call.traits.returns:
        if where is not None:
            return call.kwargs[where] if isinstance(where, str) else call.args[where]
    return result


# -- constants -------------------------------------------------------------------------------------------------------


def constant(tensor: Tensor, copy: bool = True) -> Value:
    """A Value that is known: `tensor` as it is now."""
    known = _constants.get(id(tensor))
    if known is not None and known[0] is tensor and known[1] == tensor._version:
        return known[2]
    value = Value(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        kept = tensor.detach()
        value.version = tensor._version if copy else None
        value.label = str(here())
        if copy and (tensor.numel() * tensor.itemsize <= _COPY_CONSTANT_BYTES or not _torch_owned(tensor)):
            kept = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).copy_(kept)
            value.version = None
    value.real = kept
    if _depth and copy:
        _constants[id(tensor)] = (tensor, tensor._version, value)
    return value


def constant_tensor(tensor: Tensor, copy: bool = True) -> DeferredTensor:
    """A deferred tensor whose content is known: `tensor` as it is now."""
    value = constant(tensor, copy)
    # Values are laid out from their storage's start.
    return DeferredTensor.wrap(Store(value), value.shape, value.stride, 0, value.dtype)


def _torch_owned(tensor: Tensor) -> bool:
    """Whether torch allocated the memory, so that every edit goes through torch and is counted."""
    try:
        return tensor.untyped_storage().resizable()
    except (RuntimeError, NotImplementedError):
        return False


# -- the few operations that are not recorded as themselves ----------------------------------------------------------


def _read_scalar(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    if type(tensor) is not DeferredTensor:
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)
    if _trace is not None:
        _trace.refuse_read(op)
    return value_of(tensor).item()


def _lift(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """`torch.tensor(data)`: a tensor just made from Python data, that nobody else holds."""
    tensor = args[0]
    if type(tensor) is DeferredTensor:
        return dispatch(aten.alias.default, args, kwargs)
    if _trace is None and not _depth:
        return tensor
    out = constant_tensor(tensor, copy=False)
    out._store.trace = _trace
    return out


def _no_storage_surgery(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    if not any(type(a) is DeferredTensor for a in args):
        with torch._C._DisableTorchDispatch():
            return op(*args, **kwargs)
    raise CaptureError(
        f"{here()}: {op} re-seats the storage of a deferred tensor, which has none. Assign to `.data`, or call "
        "firstloss.materialize_tensor(tensor) first."
    )


def _not_here(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """An assertion on values: a traced step has none yet."""
    if _trace is not None:
        return None
    with torch._C._DisableTorchDispatch():
        return op(*(value_of(a) if type(a) is DeferredTensor else a for a in args), **kwargs)


_LIKE: dict[Any, Any] = {
    # what they read of their argument is its geometry: (what fills the result, with which further arguments)
    aten.empty_like.default: lambda args: None,
    aten.new_empty.default: lambda args: None,
    aten.new_empty_strided.default: lambda args: None,
    aten.zeros_like.default: lambda args: (aten.zero_.default,),
    aten.new_zeros.default: lambda args: (aten.zero_.default,),
    aten.ones_like.default: lambda args: (aten.fill_.Scalar, 1),
    aten.new_ones.default: lambda args: (aten.fill_.Scalar, 1),
    aten.full_like.default: lambda args: (aten.fill_.Scalar, args[1]),
    aten.new_full.default: lambda args: (aten.fill_.Scalar, args[2]),
    aten.rand_like.default: lambda args: (aten.uniform_.default, 0.0, 1.0),
    aten.randn_like.default: lambda args: (aten.normal_.default, 0.0, 1.0),
}


def _like(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Factories that take shape and dtype from a tensor: they do not read it."""
    call = _Call(op, traits(op), args, kwargs)
    if call.on_meta or (_trace is None and not _depth and not _pending(call)):
        return _run_for_real(call)
    ((size, stride, _, dtype),) = _infer(call)
    fill = _LIKE[op](args)
    options = {"dtype": dtype, "device": _device_of(call)}
    out = dispatch(aten.empty_strided.default, (size, stride), options)
    if fill is not None:
        dispatch(fill[0], (out, *fill[1:]), {})
    return out


def _pending(call: _Call) -> bool:
    return any(t._store.resident is None for t in call.deferred)


def _normalize(op: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Batch norm's first overload writes to its running statistics without saying so in its schema; this one does."""
    x, weight, bias, mean, var, training, momentum, eps = args
    if mean is None:
        return dispatch(aten._native_batch_norm_legit.no_stats, (x, weight, bias, training, momentum, eps), kwargs)
    if not training:
        return dispatch(
            aten._native_batch_norm_legit_no_training.default, (x, weight, bias, mean, var, momentum, eps), kwargs
        )
    return dispatch(aten._native_batch_norm_legit.default, args, kwargs)


_SPECIAL: dict[Any, Any] = {
    **dict.fromkeys(_LIKE, _like),
    aten.native_batch_norm.default: _normalize,
    aten._local_scalar_dense.default: _read_scalar,
    aten.lift_fresh.default: _lift,
    aten.lift_fresh_copy.default: _lift,
    aten.set_.source_Storage: _no_storage_surgery,
    aten.set_.source_Storage_storage_offset: _no_storage_surgery,
    aten.set_.source_Tensor: _no_storage_surgery,
    aten.resize_.default: _no_storage_surgery,
    aten._assert_async.default: _not_here,
    aten._assert_async.msg: _not_here,
}


def enter() -> None:
    """A `deferred` context opens."""
    global _depth
    _depth += 1


def leave() -> None:
    """A `deferred` context closes: the last one leaves every generator where eager would have."""
    global _depth
    _depth -= 1
    if not _depth:
        _constants.clear()
        generators.settle()


def set_trace(trace: Any) -> Any:
    """Make `trace` (or None) the step trace under way; returns the one before."""
    global _trace
    before, _trace = _trace, trace
    return before


def position_of(generator: torch.Generator | None = None) -> Position:
    """Where the (global) generator stands in its stream: for reports and tests."""
    return generators.where(generator or torch.default_generator)[1]
