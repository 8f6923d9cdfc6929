"""Trace a training step (forward, backward and optimizer) as one Program.

The step's Python runs once, on tensors without values. Existing tensors that it uses (weights, optimizer state, tensors
from outside) become inputs; inputs that it has modified are state, carried from step to step; return values are
outputs. Operations are recorded below autograd, so the backward pass and the optimizer are captured like everything
else.
"""

from __future__ import annotations

import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Any, NoReturn, Protocol, TypeGuard

import numpy as np
import torch
from torch.ops import aten

from ..compat import patches
from ..compat.python_names import getframe
from ..compat.torch_names import (
    DisableTorchDispatch,
    OpOverload,
    call_impl,
    get_current_dispatch_mode_stack,
    pop_mode,
    storage_address,
    storage_use_count,
    version_of,
)
from ..errors import TraceError, ValueReadError
from ..interpreter import Undo, interruptible_inside, pause
from ..program.compare import Constant, same_bytes
from ..program.graph import Draw, Node, Ref, Value, contiguous_stride, dense_count, geometry_of, is_dense
from ..program.source import here, raised_at
from ..rng.stream import Position
from . import activation_checkpointing as _activation_checkpointing  # noqa: F401 - for its patches
from . import attention_fast_path as _attention_fast_path  # noqa: F401 - likewise
from . import data_dependent, direct_memory_access, recorder, session
from . import extrema as _extrema  # noqa: F401 - likewise
from . import number_functions as _number_functions  # noqa: F401 - likewise
from . import python_draws as _python_draws  # noqa: F401 - likewise
from . import running_averages as _running_averages  # noqa: F401 - likewise
from . import sparse_gradients as _sparse_gradients  # noqa: F401 - likewise
from .constant_folding import known_value
from .constants import constant_tensor
from .data_assignment import DataAssignments, InputView, LayoutChanges
from .input_numbers import Expression, InputNumbers, NumberNode, plain
from .op_call import OpCall
from .recorder import CaptureMode as _Capture
from .recorder import DeferredStorage, DeferredTensor

# For larger tensors the version is compared, which does not count edits through NumPy.
_COPIED_BYTES = 1 << 20


class ValueRead:
    """A tensor from outside the step, and its content when it was read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._version = None if tensor.is_inference() else version_of(tensor)
        self._copy = tensor.detach().clone() if tensor.numel() * tensor.itemsize <= _COPIED_BYTES else None

    def outdated(self) -> bool:
        """Whether the content has changed, or the tensor has moved to a backend, so that it would be an input."""
        if type(self._tensor) is DeferredTensor:
            return True
        if self._copy is None:
            return self._version is not None and version_of(self._tensor) != self._version
        now = self._tensor.detach()
        return now.shape != self._copy.shape or now.dtype != self._copy.dtype or not same_bytes(now, self._copy)


class GivenMemory:
    """A copy of a tensor's content that code outside PyTorch takes for its memory, such as NumPy's array."""

    def __init__(self, storage: DeferredStorage, original: torch.Tensor) -> None:
        self.storage = storage
        self._original = original
        with DisableTorchDispatch():
            self._copy = original.clone()
        self._holder: Callable[[], torch.Tensor | None] = lambda: None

    def give(self) -> torch.Tensor:
        """The tensor to hand out."""
        with DisableTorchDispatch():
            given = self._copy.detach()
        self._holder = weakref.ref(given)
        self._uses = storage_use_count(given.untyped_storage())
        return given

    def is_held(self) -> bool:
        """Whether the memory is still referenced."""
        held = self._holder()
        return held is not None or storage_use_count(self._copy.untyped_storage()) >= self._uses

    def is_edited(self) -> bool:
        """Whether it has been written to."""
        return not same_bytes(self._copy, self._original)


class Contents(Protocol):
    """Computes the content of Values while a step is traced.

    Attributes:
        only_numbers: whether of nothing but numbers.
    """

    only_numbers: bool

    def of(self, value: Value) -> torch.Tensor:
        """The content, with the layout of `value`; it must not be modified.

        Raises:
            NotImplementedError: if it cannot be computed.
        """

    def keep_inputs(self) -> None:
        """Keep the inputs of the trace, which it forgets."""


class KeyStream:
    """The random stream of a traced step: position n is the n-th draw of the step, regardless of its size.

    In the executable a draw's words come from a key that is derived from the run's seed, the step's number and n. As in
    a constructor's capture, positions are stored in the generator's state, so that code that saves and restores it,
    such as `torch.utils.checkpoint`, repeats the same draws.
    """

    start = Position(0)

    def absolute(self, position: Position) -> NoReturn:
        """
        Raises:
            TraceError: the draws are values of the compiled step.
        """
        raise TraceError(
            f"{here()}: a deferred module whose weights were drawn in a traced step is initialized in it. In a step "
            "random numbers are drawn by the device, at each call: construct and materialize modules before the step, "
            "or construct this one without firstloss.deferred_init."
        )


class StepTrace(recorder._Tracing):
    """The trace of a step.

    Attributes:
        inputs: for each input Value, its DeferredStorage (weights and state) or real tensor.
        closures: the calls of step closures, in order.
        set_final_generator_state: sets PyTorch's generator to the state in which the step has left it, if it did.
        made: the storages of the results of the step's operations.
        numbers: the Python numbers that are inputs.
        new_memory: assignments to the `.data` of weights.
        new_layouts: tensors that the step gives another shape or storage.
        views: the tensors that view the storages of inputs, by id.
        read_outside: real tensors from outside whose values the step's Python has read, by id.
        contents: computes the content of traced tensors whose values are read; None if none may be read.
        reads: the user's expressions that have read values of traced tensors, so that the trace is for one call only.
        number_reads: those that have read a number.
        numbers_are_inputs: whether such numbers are input numbers; otherwise, the trace is for one call, too.
        values_read: the values of the first of them, if they are known.
        runs_eagerly: whether its Python may run instead: not where several processes trace it together, nor for a plan.
        prints: whether `print` prints what is known.
        printed: whether it has done so.
        memory_given: copies of their content that code outside PyTorch takes for their memory.
        retrace_reason: why the step cannot be compiled and has to be traced at each call, if so.
        constants: the constants that are inputs.
        existed: whether an object existed before the step, or stands in for one of its arguments.
    """

    def __init__(self) -> None:
        self.existed: Callable[[Any], bool] = lambda obj: False
        self.inputs: dict[Value, DeferredStorage | torch.Tensor] = {}
        self.result_storages: list[weakref.ref[DeferredStorage]] = []
        self.mirrors: list[torch.Tensor] = []
        self._before: list[tuple[DeferredStorage, Value, Any]] = []
        self._real: dict[int, tuple[torch.Tensor, DeferredStorage]] = {}  # by storage_key
        self.outside: dict[int, tuple[torch.Tensor, Any, int]] = {}  # with geometry and storage_key, by id
        self._arguments: dict[Value, DeferredStorage] = {}
        self._outer: StepTrace | None = None  # the enclosing trace
        self.stream: KeyStream = KeyStream()
        self._position: Position | None = KeyStream.start  # None after the step has seeded the generator
        self.set_final_generator_state: Callable[[], Any] | None = None
        self._seed = torch.initial_seed()
        self.changes: Any = None
        self.draws: int = 0
        self.closures: list[Any] = []
        self.views: dict[int, InputView] = {}
        self.read_outside: dict[int, ValueRead] = {}
        self.contents: Contents | None = None
        self.reads: list[data_dependent.ValueRequest] = []
        self.number_reads: list[data_dependent.ValueRequest] = []
        self.numbers_are_inputs = False
        self.values_read: Iterator[Any] = iter(())
        self.runs_eagerly = True
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []  # of its own, with their states before
        self.prints = True
        self.printed = False
        self._stdout = sys.stdout
        self.memory_given: list[GivenMemory] = []
        self.retrace_reason: str | None = None
        self.constants: Set[Constant] = frozenset()
        self.aliased_storages: weakref.WeakSet[Any] = weakref.WeakSet()
        session.traces.add(self)
        self.numbers: InputNumbers = InputNumbers()
        self.new_memory: DataAssignments = DataAssignments(self)
        self.new_layouts: LayoutChanges = LayoutChanges(self)

    # -- the interface for the recorder --

    def adopt(self, storage: DeferredStorage) -> None:
        """Make a storage that existed before the step an input."""
        if storage.trace is not None and storage.resident is None and storage.trace is not self._outer:
            raise TraceError(
                f"{here()}: the step reads a tensor that an earlier traced step created and did not return, so its "
                "value was not kept. Return it from that step, or store it in a module's buffer or the optimizer's "
                "state."
            )
        self._before.append((storage, storage.value, storage.trace))
        for tensor in storage.alive():
            InputView.record(tensor, self.views)
        old = storage.value
        value = Value(old.shape, old.stride, old.dtype, old.device, label=f"in{len(self.inputs)}")
        self.inputs[value] = storage
        storage.value = value
        storage.trace = self

    def adopt_real(self, tensor: torch.Tensor) -> DeferredStorage:
        """Make a real tensor from outside an input, which is read at each step; views of one storage share an input."""
        key = storage_key(tensor)
        entry = self._real.get(key)
        if entry is None:
            base = whole_storage(tensor)
            value = Value(tuple(base.shape), base.stride(), base.dtype, base.device, label=f"in{len(self.inputs)}")
            storage = DeferredStorage(value)
            storage.trace = self
            self.inputs[value] = base
            entry = self._real[key] = (base, storage)
        self.record_external(tensor)
        if _nbytes(tensor) > _nbytes(entry[0]):
            self._refuse_overlap(tensor, entry[0])
        return entry[1]

    def record_external(self, tensor: torch.Tensor) -> None:
        """Note that the step uses a real tensor from outside, whose identity is guarded."""
        self.outside[id(tensor)] = (tensor, geometry_of(tensor), storage_key(tensor))

    def refuse_overlaps(self) -> None:
        """Refuse writes to tensors from outside whose storages overlap in memory."""
        spans = [(begin, begin + _nbytes(base), base, storage) for begin, (base, storage) in sorted(self._real.items())]
        for (_, end, base, storage), (begin, _, other, other_storage) in itertools.pairwise(spans):
            if begin < end and any(s.value is not s.first for s in (storage, other_storage)):
                self._refuse_overlap(base, other)

    def _refuse_overlap(self, a: torch.Tensor, b: torch.Tensor) -> NoReturn:
        raise TraceError(
            f"{here()}: the step uses two tensors, of {_nbytes(a):,} and {_nbytes(b):,} bytes, that share overlapping "
            "memory of another object, such as a NumPy array. Create one tensor of all of it, and use views of that."
        )

    def unwritten(self, tensor: torch.Tensor) -> bool:
        """Whether the step has not written to a real tensor from outside."""
        entry = self._real.get(storage_key(tensor))
        return entry is None or entry[1].value is entry[1].first

    def before(self, storage: DeferredStorage) -> Value:
        """The content of a storage that existed before the step, before it."""
        return next(value for before, value, _ in self._before if before is storage)

    def outside_of(self, storage: DeferredStorage) -> torch.Tensor | None:
        """The real tensor from outside, its whole storage, that is represented by `storage`."""
        return next((base for base, known_storage in self._real.values() if known_storage is storage), None)

    def views_of(self, tensor: int) -> int:
        """The number of real tensors from outside that share the storage of one, given by its id."""
        entry = self.outside.get(tensor)
        return 0 if entry is None else sum(key == entry[2] for _, _, key in self.outside.values())

    def is_external(self, storage: DeferredStorage) -> bool:
        """Whether `storage` existed before the step, or represents a real tensor that did."""
        return storage.first in self.inputs or any(storage is before for before, _, _ in self._before)

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether a real tensor from outside shares the storage of `tensor`."""
        return storage_key(tensor) in self._real

    def as_input(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DeferredStorage] | None:
        """The input of a real tensor's storage, if it is one: a tensor of all of it, and its DeferredStorage."""
        return self._real.get(storage_key(tensor))

    def has_input_at(self, address: int) -> bool:
        """Whether the storage of a real tensor from outside begins at `address`."""
        return address in self._real

    def replace_input(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Replace the input `tensor` by `other`, which is the same view of its storage."""
        key = storage_key(tensor)
        _, storage = self._real[key]
        self._real[key] = other, storage
        self.inputs[storage.first] = other

    def has_changed_layout(self) -> bool:
        """Whether a real tensor from outside has since been resized or rebound (`resize_`, `set_`, `.data = ...`)."""
        for tensor, geometry, key in self.outside.values():
            if geometry_of(tensor) != geometry or type(tensor) is not DeferredTensor and storage_key(tensor) != key:
                return True
        return False

    def read_real(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the step's Python reads the value of a real tensor.

        Returns:
            The tensor; a traced one if the step has written to it.
        """
        entry = self._real.get(storage_key(tensor))
        if entry is not None and entry[1].value is not entry[1].first:
            return DeferredTensor.wrap(entry[1], *geometry_of(tensor))
        with DisableTorchDispatch():
            self.read_outside.setdefault(id(tensor), ValueRead(tensor))
        return tensor

    def new_input(self, tensor: torch.Tensor, label: str, may_change: bool = False) -> DeferredTensor:
        """Create a traced tensor for an argument of the step, with the shape of `tensor` and a dense layout.

        Args:
            may_change: whether writes to it are part of `changes`.
        """
        shape = tuple(tensor.shape)
        stride = tensor.stride() if is_dense(tensor) else contiguous_stride(shape)
        value = Value(shape, stride, tensor.dtype, torch.device("cpu"), label=label)
        storage = DeferredStorage(value)
        storage.trace = self
        self.inputs[value] = tensor
        if may_change:
            self._arguments[value] = storage
        return DeferredTensor.wrap(storage, shape, stride, 0, tensor.dtype)

    def is_argument(self, value: Value) -> bool:
        """Whether an input is an argument of the call."""
        return value in self._arguments

    def number(self, tensor: torch.Tensor) -> Any:
        """The number in a tensor of one element, which the step's Python reads; an input number if it can be one."""
        known = known_value(tensor)
        if known is not None or type(tensor) is not DeferredTensor or tensor.is_complex() or tensor.numel() != 1:
            return (self.read(tensor) if known is None else known).item()
        if self.contents is None:
            self.refuse_read(torch.ops.aten._local_scalar_dense.default)
        if tensor._storage.trace is not self:
            self.adopt(tensor._storage)
        ref = tensor._ref()
        expression = self.numbers.by_ref.get(ref)
        if expression is None:
            value = next(self.values_read, None)
            if value is None:
                value = self._content(ref, torch.ops.aten._local_scalar_dense.default).item()
            self.number_reads.append(data_dependent.value_request())
            expression = self.numbers.read_from(ref, value)
        number = self.numbers.of(expression)
        return number if self.numbers_are_inputs else plain(number)

    def _content(self, ref: Ref, op: OpOverload) -> torch.Tensor:
        assert self.contents is not None
        try:
            content = self.contents.of(ref.value)
        except NotImplementedError as error:
            raise ValueReadError(data_dependent.message(op)) from error
        with DisableTorchDispatch(), torch.no_grad():
            return ref.view(content)

    def _computed(self, expression: Expression, dtype: torch.dtype) -> DeferredTensor | None:
        """The traced tensor that has the value of an expression of numbers that are read from tensors, computed as
        Python would, in float64 or int64; None if it cannot be."""
        if not expression.is_read:
            return self.input_of(NumberNode(expression.example, expression, self.numbers), dtype)
        if expression.combine is None:
            ref = self.numbers.reads[expression]
            storage = DeferredStorage(ref.value)
            storage.trace = self
            tensor = DeferredTensor.wrap(storage, ref.size, ref.stride, ref.offset, ref.dtype)
            tensor = recorder.dispatch(aten.view.default, (tensor, ()), {})
            return recorder.dispatch(aten._to_copy.default, (tensor,), {"dtype": dtype})
        op = _EXACT.get(expression.combine)
        operands = [
            self._computed(operand, dtype) if type(operand) is Expression else _constant_number(operand, dtype)
            for operand in expression.operands
        ]
        return None if op is None or any(o is None for o in operands) else recorder.dispatch(op, tuple(operands), {})

    def input_of(self, node: NumberNode, dtype: torch.dtype | None = None, label: str = "number") -> DeferredTensor:
        """The input that has the value of an input number: 0-dim, by default float64 or int64."""
        dtype = (torch.float64 if node.is_float() else torch.int64) if dtype is None else dtype
        if node.expression.is_read:
            return self._computed_number(node, dtype)
        tensor = self.numbers.inputs.get((node.expression, dtype))
        if tensor is None:
            with DisableTorchDispatch():
                example = torch.full((), node.number, dtype=dtype)
            tensor = self.new_input(example, f"{label}{len(self.numbers.inputs)}")
            self.numbers.inputs[node.expression, dtype] = tensor
        return tensor

    def constants_as_inputs(self, call: OpCall) -> OpCall:
        """`call`, with input numbers in place of those constants that are inputs. (Python has computed them for this
        trace, in a way that is not known, as in `temperatures[epoch]`.)"""
        if all(constant.op is not call.op for constant in self.constants):
            return call
        line = here()

        def given(at: int | str, arg: Any) -> Any:
            if type(arg) not in (int, float) or Constant(call.op, line, at) not in self.constants:
                return arg
            return self.numbers.constant(arg)

        kwargs = {name: given(name, arg) for name, arg in call.kwargs.items()}
        return OpCall(call.op, call.traits, tuple(itertools.starmap(given, enumerate(call.args))), kwargs)

    def _computed_number(self, node: NumberNode, dtype: torch.dtype) -> DeferredTensor:
        """As `input_of`, for a number that depends on what is read from tensors."""
        tensor = self._computed(node.expression, torch.float64 if node.is_float() else torch.int64)
        if tensor is None:
            return _constant_number(node.specialized(), dtype)
        return recorder.dispatch(aten._to_copy.default, (tensor,), {"dtype": dtype})

    def input_array(self, expression: Expression, array: np.ndarray) -> DeferredTensor:
        """The input that has the content of an array: of its shape and dtype, and dense."""
        with DisableTorchDispatch():
            example = torch.from_numpy(np.array(array, order="C"))
        tensor = self.numbers.inputs.get((expression, example.dtype))
        if tensor is None:
            tensor = self.new_input(example, f"number{len(self.numbers.inputs)}")
            self.numbers.inputs[expression, example.dtype] = tensor
        return tensor

    def is_console(self, file: Any) -> bool:
        """Whether what is printed to `file` goes to the console: not where the step redirects it."""
        return sys.stdout is self._stdout and (file is None or file is sys.stdout or file is sys.stderr)

    def may_read(self) -> bool:
        """Whether the step may read any values."""
        return self.contents is not None and self.runs_eagerly

    def refuse_read(self, op: OpOverload) -> NoReturn:
        """Refuse to read a value, or a size that depends on values."""
        raise ValueReadError(data_dependent.message(op))

    def read(self, tensor: torch.Tensor, op: OpOverload = torch.ops.aten._local_scalar_dense.default) -> torch.Tensor:
        """The content of a tensor, which the step's Python reads: from now on, the trace is for this content only.

        Args:
            op: the operation that needs it.

        Raises:
            ValueReadError: if values may not be read.
        """
        if type(tensor) is not DeferredTensor:
            tensor = self.read_real(tensor)
        if type(tensor) is not DeferredTensor:
            return tensor
        if self.contents is None or self.contents.only_numbers:
            self.refuse_read(op)
        if tensor._storage.trace is not self:
            self.adopt(tensor._storage)
        ref, request = tensor._ref(), data_dependent.value_request()
        content = self._content(ref, op)
        self.reads.append(request)
        with DisableTorchDispatch(), torch.no_grad():
            if self.runs_eagerly and not ref.value.known:
                ref.value.real = self.contents.of(ref.value)
            return content.clone()

    def computed_from_reads(self, content: torch.Tensor) -> DeferredTensor:
        """A tensor with content that has been computed from values that were read: a constant, or an input where what
        is left is compiled, so that other values need no other executable."""
        if not self.runs_eagerly:
            return self.new_input(content, f"read{len(self.inputs)}")
        out = constant_tensor(content, copy=False)
        out._storage.trace = self
        return out

    def memory_of(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """A tensor that stands for the memory of a traced one: `copy`, its content; see `check_memory`."""
        if type(tensor) is not DeferredTensor or known_value(tensor) is None:
            return copy
        given = GivenMemory(tensor._storage, copy)
        self.memory_given.append(given)
        return given.give()

    def check_memory(self, storages: Iterable[DeferredStorage] | None = None) -> None:
        """Check that nobody sees that memory handed out is a copy.

        Args:
            storages: those that are written to now; by default, the trace is complete.

        Raises:
            ValueReadError: if it has been edited, or if the tensor is edited while it is held.
        """
        for given in self.memory_given:
            written = storages is not None and any(storage is given.storage for storage in storages)
            if written and given.is_held() or storages is None and given.is_edited():
                raise ValueReadError(
                    f"{here()}: the step gives the memory of a tensor to code outside PyTorch, as x.numpy() does, and "
                    "edits it there, or edits the tensor. While a step is traced, that memory is a copy: use a clone "
                    "of the tensor."
                )

    def is_only_displayed(self, tensor: torch.Tensor) -> bool:
        """Whether to print a placeholder: the tensor has no value, and the text is only displayed."""
        return known_value(tensor) is None and data_dependent.is_shown()

    def draws_now(self, generator: torch.Generator | None) -> bool:
        """Whether a draw from `generator` is made while the step is traced, which is then for these numbers only: from
        one of its own, where values may be read."""
        if generator is None or generator is torch.default_generator:
            return False
        if self.contents is None or self.contents.only_numbers:
            return False
        if all(generator is not known for known, _ in self.generators):
            self.generators.append((generator, generator.get_state()))
        self.reads.append(data_dependent.value_request()._replace(kind="generator"))
        return True

    def restore_generators(self) -> None:
        """Undo its draws from generators of the step's own."""
        with DisableTorchDispatch():
            for generator, state in self.generators:
                generator.set_state(state)

    def key_draw(self, node: Node, generator: torch.Generator | None) -> None:
        """Give a random operation the next key of the step's stream."""
        if generator is not None and generator is not torch.default_generator:
            raise TraceError(
                f"{node.source}: the step draws from a generator of its own, which a compiled step cannot use or "
                "advance. Draw before the step and pass the numbers as an argument; or omit `generator`, and the step "
                "draws new numbers each time, from the run's seed."
            )
        position = self._position
        if position is None or torch.initial_seed() != self._seed:
            raise TraceError(
                f"{node.source}: the step seeds or replaces the random generator while it is being traced. Seed once, "
                "before the first step: every step then draws new numbers, reproducibly."
            )
        after = Position(position.words + 1)
        node.draw = Draw(self.stream, position, after)  # type: ignore[arg-type]
        self._position = after
        self.draws += 1

    def generator_state(self) -> torch.Tensor:
        """A ticket in place of the state of PyTorch's generator, which other threads may use."""
        if self._position is None:
            return torch.default_generator.get_state()
        with DisableTorchDispatch():
            return recorder.generators.ticket(torch.default_generator, self.stream, self._position)  # type: ignore[arg-type]

    def set_generator_state(self, state: torch.Tensor | None, leave: Callable[[], Any]) -> None:
        """Restore a generator state or (None) seed it, in the trace; `leave` does so after each call of the step."""
        with DisableTorchDispatch():
            position = None if state is None else recorder.generators.named(state)
        self._position = position[1] if position is not None and position[0] is self.stream else None
        self.set_final_generator_state = leave if self._position is None else None

    # -- around the step --

    @interruptible_inside
    def active(self) -> Iterator[None]:
        """Trace the block; afterwards every DeferredStorage is restored."""
        with session.KeepsGradMode(runs_users_code=True), session.tracing, Undo() as undo, undo:
            before: Any = session.trace
            self._outer = before
            undo(self._restore, before)
            recorder.set_trace(self)
            undo(session.generators.end_trace, self)
            session.generators.begin_trace(self)
            pause(undo)
            for when in (patches.CAPTURE, patches.TRACE):
                undo(patches.leave, when, self)
                patches.enter(when, self)
            # In this thread libraries avoid data-dependent branches, and optimizers keep tensors.
            patches.swap(undo, "torch.compiler._is_compiling_flag", _TRACING)
            try:
                if before is None:
                    undo(_pop_modes, len(get_current_dispatch_mode_stack()))
                    with _Capture():
                        yield
                else:
                    yield
            except RuntimeError as error:
                if not direct_memory_access.is_unallocated(error):
                    raise
                raise ValueReadError(direct_memory_access.message(raised_at(error))) from error

    def _restore(self, before: Any) -> None:
        """Restore every DeferredStorage as it was before the step. Idempotent."""
        recorder.set_trace(before)
        self.mirrors.clear()
        if self.changes is None:
            self.changes = {value: storage.value for value, storage in self._storages() if storage.value is not value}
        for storage, value, trace in reversed(self._before):
            storage.value = value
            storage.trace = trace

    def _storages(self) -> list[tuple[Value, DeferredStorage]]:
        """The inputs that may be written to, in order of first use."""
        real = {storage.first: storage for _, storage in self._real.values()} | self._arguments
        storages = ((v, base if isinstance(base, DeferredStorage) else real.get(v)) for v, base in self.inputs.items())
        return [(value, storage) for value, storage in storages if storage is not None]


def _pop_modes(depth: int) -> None:
    while len(get_current_dispatch_mode_stack()) > depth:
        pop_mode()


class _Tracing:
    """A flag that is true in a thread that traces a step.

    False for `Module._call_impl`, which would otherwise skip hooks with `always_call=True` after an exception.
    """

    def __bool__(self) -> bool:
        return session.trace is not None and getframe(1).f_code is not call_impl.__code__

    # Libraries combine the flag with other bools.
    def __or__(self, other: Any) -> Any:
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))


_TRACING = _Tracing()


# Python's operations on numbers that operations on tensors in float64 or int64 do exactly.
_EXACT: dict[Any, OpOverload] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
    operator.pos: aten.clone.default,
    operator.abs: aten.abs.default,
}


def _constant_number(number: Any, dtype: torch.dtype) -> DeferredTensor:
    with DisableTorchDispatch():
        constant = constant_tensor(torch.full((), number, dtype=dtype), copy=False)
    constant._storage.trace = session.trace
    return constant


# A view of a larger storage is refused, since the whole would be copied at each call.
_MAX_VIEWED_BYTES = 1 << 28


def storage_key(tensor: torch.Tensor) -> int:
    """A key that is equal for tensors whose storages begin at the same address (several may share NumPy's memory)."""
    if type(tensor) is DeferredTensor:
        return id(tensor._storage)
    storage = _storage_of(tensor)
    if storage is None:
        return id(tensor)
    return (storage.data_ptr() if tensor.device.type == "cpu" else 0) or storage_address(storage)


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None for one without, such as a sparse tensor."""
    with DisableTorchDispatch():
        try:
            return tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return None


def _nbytes(tensor: torch.Tensor) -> int:
    storage = _storage_of(tensor)
    return 0 if storage is None else storage.nbytes()


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that covers the whole storage of `tensor`; itself if it does."""
    storage = _storage_of(tensor)
    if storage is None:
        return tensor
    with DisableTorchDispatch(), torch.no_grad():
        size = tensor.numel() * tensor.itemsize
        if storage.nbytes() == size and dense_count(tuple(tensor.shape), tensor.stride()) == tensor.numel():
            return tensor
        if tensor.is_conj() or tensor.is_neg() or storage.nbytes() == 0:
            return tensor
        if storage.nbytes() > max(_MAX_VIEWED_BYTES, 2 * size):
            raise TraceError(
                f"{here()}: the step reads a view, created outside of it, of a tensor of {storage.nbytes():,} bytes, "
                "which would be copied as a whole at each call. Pass the view as an argument, or read a clone of it."
            )
        flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return flat.set_(storage, 0, (storage.nbytes() // tensor.itemsize,), (1,))


def is_traced(tensor: Any, trace: StepTrace) -> TypeGuard[DeferredTensor]:
    """Whether `tensor` was created in `trace` and has no value outside of it."""
    return type(tensor) is DeferredTensor and tensor._storage.trace is trace
