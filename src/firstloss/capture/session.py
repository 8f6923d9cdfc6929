"""The captures in progress in this thread: open `deferred` contexts, and at most one step trace.

`trace`, `depth` and `constants` are each thread's own, though they are read as this module's. PyTorch's generators are
the process's: threads that capture side by side draw from them in turns, as eager PyTorch's threads do.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import torch

from ..compat import patches
from ..compat.torch_names import OpOverload
from ..program.graph import Node, Value
from .generators import Generators

Storage = Any  # a DeferredStorage, of which nothing is asked here: `tensor.py` knows the session


class SupportsDataAssignment(Protocol):
    """What deferred tensors need of the weights that a step gives other memory (`data_assignment.py`): see there."""

    def assign(self, weight: torch.Tensor, other: Any) -> None: ...

    def now_of(self, storage: Storage) -> Storage: ...

    def refuse(self, weight: torch.Tensor, why: str) -> NoReturn: ...


class SupportsLayoutChange(Protocol):
    """What deferred tensors need of the tensors that a step gives another shape or storage (`layout_changes.py`)."""

    def change(self, tensor: torch.Tensor) -> None: ...

    def edit(self, storage: torch.UntypedStorage) -> None: ...


class Tracing:
    """What the recorder needs of a step trace (`step.py`): see there."""

    cbfloat16 = False  # what is float16 in the step is cbfloat16
    is_open = False  # under way, in some thread
    latest: Value | None = None  # what the last recorded operation made
    made: list[weakref.ref[Storage]]  # the storages of what recorded operations made

    mirrors: list[torch.Tensor]  # keeps the mirrors of memory from outside, at which real tensors look
    aliased_storages: weakref.WeakSet[Storage]  # of a backend, in whose memory a real tensor of the step lies

    new_memory: SupportsDataAssignment
    new_layouts: SupportsLayoutChange
    retrace_reason: str | None  # no compiled step can do what the step did, if so

    def as_input(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Storage] | None:
        raise NotImplementedError

    def has_input_at(self, address: int) -> bool:
        raise NotImplementedError

    def shows_as(self, tensor: torch.Tensor, other: torch.Tensor) -> None: ...

    def adopt(self, storage: Storage) -> None: ...

    def is_external(self, storage: Storage) -> bool:
        raise NotImplementedError

    def views_of(self, tensor: torch.Tensor) -> int:
        raise NotImplementedError

    def record_external(self, tensor: torch.Tensor) -> None: ...

    def adopt_real(self, tensor: torch.Tensor) -> Storage:
        raise NotImplementedError

    def read_real(self, tensor: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def shares(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def refuse_read(self, op: OpOverload) -> None: ...

    def is_only_displayed(self, tensor: torch.Tensor) -> bool:
        raise NotImplementedError

    def key_draw(self, node: Node, generator: torch.Generator | None) -> None: ...

    def generator_state(self) -> torch.Tensor:
        raise NotImplementedError

    def set_generator_state(self, state: torch.Tensor | None, leave: Callable[[], Any]) -> None: ...


class _ThreadLocal(threading.local):
    """What is under way in one thread."""

    def __init__(self) -> None:
        self.trace: Tracing | None = None
        self.holder = object()  # of the patches that an open context needs
        self.depth = 0
        self.constants: dict[int, tuple[torch.Tensor, int, Value]] = {}
        self.deferred_file_tensors: dict[int, tuple[torch.Tensor, Storage]] = {}


_this_thread = _ThreadLocal()


class _Session(types.ModuleType):
    trace = property(lambda self: _this_thread.trace)
    depth = property(lambda self: _this_thread.depth)
    constants = property(lambda self: _this_thread.constants)
    deferred_file_tensors = property(lambda self: _this_thread.deferred_file_tensors)


sys.modules[__name__].__class__ = _Session

trace: Tracing | None  # the step trace under way
depth: int  # how many `deferred` contexts are open
# Constants met by the contexts that are open: by the tensor's id, the tensor itself, its version and its Value.
constants: dict[int, tuple[torch.Tensor, int, Value]]
# Tensors of mapped files that parameters were made of: by their address, the tensor and what stands for its memory.
deferred_file_tensors: dict[int, tuple[torch.Tensor, Storage]]
reseated = 0  # how often a tensor that lives on a backend was given other memory
traces: weakref.WeakSet[Tracing] = weakref.WeakSet()  # of steps that may be called again, and the one under way
seedings = 0  # how often torch.manual_seed has been called
generators = Generators()
tracing = threading.RLock()  # of the thread that traces a step: functions of the process are replaced meanwhile


def enter(policy: str | None = None, preserve: bool = False) -> None:
    """A `deferred` context opens; random streams follow `policy`, or the one that they follow already.

    With `preserve`, the outermost one leaves generators where they would be if it had drawn nothing.
    """
    generators.policy = policy or generators.policy
    if not _this_thread.depth:
        patches.enter(patches.CAPTURE, _this_thread.holder)
        generators.preserve = preserve
        generators.opened()
    _this_thread.depth += 1


def leave() -> None:
    """A `deferred` context closes: the last one leaves every generator where eager would have."""
    _this_thread.depth -= 1
    if not _this_thread.depth:
        _this_thread.constants.clear()
        _this_thread.deferred_file_tensors.clear()
        generators.closed()
        generators.policy = "eager"
        generators.preserve = False
        patches.leave(patches.CAPTURE, _this_thread.holder)


def set_trace(new: Any) -> Any:
    """Make `new` (or None) the step trace under way in this thread; returns the one before."""
    before, _this_thread.trace = _this_thread.trace, new
    if before is not None:
        before.is_open = False
    if new is not None:
        new.is_open = True
    return before
