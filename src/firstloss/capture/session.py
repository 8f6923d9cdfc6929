"""The captures in progress in this thread: open `deferred` contexts, and at most one step trace.

`trace`, `depth` and `constants` are thread-local, though they are read as module attributes. PyTorch's generators are
shared by all threads that capture concurrently, as in eager PyTorch.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from ..compat import patches
from ..compat.locks import fork_safe_lock
from ..compat.torch_names import OpOverload
from ..program.graph import Node, Value
from .generators import Generators
from .input_numbers import Expression, InputNumbers, NumberNode

Storage = Any  # a DeferredStorage; `tensor.py` imports this module


class KeepsGradMode:
    """A block that an exception leaves with gradients enabled or disabled as before.

    `torch.no_grad` is written in Python: a signal whose handler raises between its change and the start of its block
    leaves gradients disabled for the rest of the process.
    """

    __slots__ = ("_before", "_kinds")

    def __init__(self, *, runs_users_code: bool = False) -> None:
        """
        Args:
            runs_users_code: whether an Exception keeps the mode, which the user's code may have set.
        """
        self._kinds = (KeyboardInterrupt, SystemExit) if runs_users_code else BaseException

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and issubclass(kind, self._kinds):
            torch.set_grad_enabled(self._before)


class SupportsDataAssignment(Protocol):
    """The interface of `data_assignment.DataAssignments` that deferred tensors use."""

    def assign(self, weight: torch.Tensor, other: Any) -> None: ...

    def current_storage(self, storage: Storage) -> Storage: ...

    def refuse(self, weight: torch.Tensor, why: str) -> NoReturn: ...


class SupportsLayoutChange(Protocol):
    """The interface of `data_assignment.LayoutChanges` that deferred tensors use."""

    def change(self, tensor: torch.Tensor) -> None: ...

    def edit(self, storage: torch.UntypedStorage) -> None: ...


class Tracing:
    """The interface of a step trace (`step.StepTrace`) that the recorder uses."""

    numbers: InputNumbers
    cbfloat16 = False  # float16 in the step is cbfloat16
    is_open = False  # active, in some thread
    latest: Value | None = None  # the last result of a recorded operation
    result_storages: list[weakref.ref[Storage]]  # the storages of the results of recorded operations

    mirrors: list[torch.Tensor]  # keeps the mirrors of real tensors' memory alive
    aliased_storages: weakref.WeakSet[Storage]  # on a backend, whose memory a real tensor of the step shares

    new_memory: SupportsDataAssignment
    new_layouts: SupportsLayoutChange
    memory_given: list[Any]  # copies of tensors' content that code outside PyTorch has as their memory
    retrace_reason: str | None  # why the step cannot be compiled and has to be traced at each call
    constants: Set[Any]  # of operations, that are inputs
    outdated = False  # whether tensors share memory now in ways that the trace has not seen

    def as_input(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Storage] | None:
        raise NotImplementedError

    def has_input_at(self, address: int) -> bool:
        raise NotImplementedError

    def replace_input(self, tensor: torch.Tensor, other: torch.Tensor) -> None: ...

    def adopt(self, storage: Storage) -> None: ...

    def is_external(self, storage: Storage) -> bool:
        raise NotImplementedError

    def views_of(self, tensor: int) -> int:
        raise NotImplementedError

    def record_external(self, tensor: torch.Tensor) -> None: ...

    def adopt_real(self, tensor: torch.Tensor) -> Storage:
        raise NotImplementedError

    def read_real(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def shares(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def refuse_read(self, op: OpOverload) -> NoReturn:
        raise NotImplementedError

    def read(self, tensor: torch.Tensor, op: OpOverload = torch.ops.aten._local_scalar_dense.default) -> torch.Tensor:
        raise NotImplementedError

    def draws_now(self, generator: torch.Generator | None) -> bool:
        raise NotImplementedError

    def computed_from_reads(self, content: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def number(self, tensor: torch.Tensor) -> Any:
        raise NotImplementedError

    def memory_of(self, tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def check_memory(self, storages: Iterable[Storage]) -> None: ...

    def begin_backward(self) -> None: ...

    def may_read(self) -> bool:
        return False

    def is_only_displayed(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def input_of(self, node: NumberNode, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise NotImplementedError

    def constants_as_inputs(self, call: Any) -> Any:
        raise NotImplementedError

    def input_array(self, expression: Expression, array: np.ndarray) -> torch.Tensor:
        raise NotImplementedError

    def key_draw(self, node: Node, generator: torch.Generator | None) -> None: ...

    def generator_state(self) -> torch.Tensor:
        raise NotImplementedError

    def set_generator_state(self, state: torch.Tensor | None, leave: Callable[[], Any]) -> None: ...


class _ThreadLocal(threading.local):
    """The captures of one thread."""

    def __init__(self) -> None:
        self.trace: Tracing | None = None
        self.holder = object()  # the key under which open contexts hold their patches
        self.depth = 0
        self.constants: dict[int, tuple[torch.Tensor, int, Value]] = {}
        self.deferred_file_tensors: dict[int, tuple[torch.Tensor, Storage]] = {}
        # While a step runs by its Python: the storages on a backend on which it has called PyTorch's kernels.
        # Whether copies of deferred tensors to real memory compute nothing else, and views are not used any more.
        self.copies_alone = False
        self.used: set[weakref.ref[Storage]] | None = None


this_thread = _ThreadLocal()  # for what runs at each operation: its attributes take a quarter of the time of `trace`


def _thread_local(name: str) -> property:
    """An attribute of `this_thread`, read without Python code in between."""
    return property(functools.partial(getattr, this_thread, name))  # the property's owner is an unused default


class _Session(types.ModuleType):
    trace = _thread_local("trace")
    depth = _thread_local("depth")
    constants = _thread_local("constants")
    deferred_file_tensors = _thread_local("deferred_file_tensors")


sys.modules[__name__].__class__ = _Session

trace: Tracing | None  # the active step trace
depth: int  # the number of open `deferred` contexts
# The constants of the open contexts: by the tensor's id, the tensor, its version and its Value.
constants: dict[int, tuple[torch.Tensor, int, Value]]
# Tensors of mapped files that parameters were made from: by address, the tensor and its DeferredStorage.
deferred_file_tensors: dict[int, tuple[torch.Tensor, Storage]]
rebinds = 0  # the number of times that a tensor on a backend was given another storage or another view of it
traces: weakref.WeakSet[Tracing] = weakref.WeakSet()  # of steps that may be called again, and the active one
seedings = 0  # the number of calls of torch.manual_seed
generators = Generators()
tracing: Any = fork_safe_lock()  # one thread at a time traces a step, since it patches functions of the process


def enter(policy: str | None = None, preserve: bool = False) -> None:
    """Enter a `deferred` context.

    Args:
        policy: of random streams; None keeps the current one.
        preserve: on leaving the outermost context, restore generators as if nothing had been drawn.
    """
    generators.policy = policy or generators.policy
    if not this_thread.depth:
        patches.enter(patches.CAPTURE, this_thread.holder)
        generators.preserve = preserve
        generators.begin_capture()
    this_thread.depth += 1


def leave() -> None:
    """Leave a `deferred` context; after the outermost one every generator has the state that eager would leave."""
    this_thread.depth -= 1
    if not this_thread.depth:
        this_thread.constants.clear()
        this_thread.deferred_file_tensors.clear()
        generators.end_capture()
        generators.policy = "eager"
        generators.preserve = False
        patches.leave(patches.CAPTURE, this_thread.holder)


def set_trace(new: Any) -> Any:
    """Make `new` (or None) the active step trace of this thread; returns the previous one."""
    before, this_thread.trace = this_thread.trace, new
    if before is not None:
        before.is_open = False
    if new is not None:
        new.is_open = True
    return before
