"""Step closures: functions called in a step that run when its values are available."""

from __future__ import annotations

import functools
import io
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec

import torch

from ...capture import session
from ...capture.constant_folding import known_value
from ...capture.input_numbers import is_input_number, is_plain_number
from ...capture.input_texts import InputText, input_of, printed, text_of
from ...capture.op_call import ref_of
from ...capture.step import StepTrace
from ...capture.tensor import DeferredTensor, Hooks
from ...compat.patches import replaces
from ...compat.python_names import getframe
from ...compat.torch_names import pytree
from ...errors import ClosureError, StepAssertionError
from ...program.graph import Ref, Value
from ...program.source import Source, here
from ..device.lazy_array import LazyArray, ready
from ..guards.bytecode import Passed, call_at
from ..guards.reconstruct import CallFrame, Reconstructor
from ..guards.recording import Site
from ..pytrees import is_size
from . import loop as loops
from .closure_containers import Container, Copy, InLoop, all_in, at_call, found, kept, taken_apart

P = ParamSpec("P")


def step_closure(closure: Callable[P, Any]) -> Callable[P, None]:
    """Make `closure` run after the step, with values: for logging, printing, metrics and checks.

    A call inside a traced step is recorded when the step is traced, and runs after each execution of the step, with the
    values that its tensor arguments have at that point of the step. A call in the loop's body runs once. In a
    `DataExecutor`'s loop it runs when the values are available, without blocking Python: in the loop's thread, in the
    order of the calls, at most two steps late, on the executor's activation steps. Its exceptions are raised out of the
    loop. Without an executor, and on the "CPU" and "GPU" backends, it runs at once.

    Tensor arguments are passed as tensors on the host, in memory of their own; numbers and texts that are inputs of a
    step, as they are at its call. Lists and dicts are passed as they were at the call; the closure may change those
    that hold no tensor. Other arguments are passed as they are: inside a step, as they were when it was traced. The
    call returns None.

    Examples:
        >>> device = fl.backend("XLA")
        >>> sums = []
        >>> @fl.step_closure
        ... def log(value):
        ...     sums.append(value.item())
        >>> @fl.trace
        ... def step(x):
        ...     log(x.sum())
        >>> for i in range(3):
        ...     step(torch.full((2,), float(i)))
        >>> sums
        [0.0, 2.0, 4.0]

    Args:
        closure: a function of tensors, in lists, tuples and dicts, and of anything else.

    Returns:
        A function of the same arguments.

    Raises:
        ClosureError: if `closure` cannot be called; and when it has run, if it has changed a list or dict that the
            step, or the loop's body, had changed after the call, too.
    """
    return _Closure(closure, checkpoint=False)


def checkpoint_closure(closure: Callable[P, Any]) -> Callable[P, None]:
    """Like `step_closure`, but run it only on the executor's checkpoint steps, and before any further step.

    So it may read weights and optimizer state (`model.state_dict()`), which are those after the step.

    Examples:
        >>> device = fl.backend("XLA")
        >>> saved = []
        >>> @fl.checkpoint_closure
        ... def save(number):
        ...     saved.append(number)
        >>> batches = fl.utils.data.DataLoader(lambda: [torch.ones(2)])
        >>> for i, batch in enumerate(fl.utils.data.DataExecutor(batches, num_steps=6, checkpoint_steps=3)):
        ...     save(i + 1)
        >>> saved
        [3, 6]

    Args:
        closure: as for `step_closure`.

    Returns:
        A function of the same arguments.

    Raises:
        ClosureError: when it is called outside of a `DataExecutor`'s loop, which determines the checkpoint steps.
    """
    return _Closure(closure, checkpoint=True)


class _Closure:
    def __init__(self, closure: Callable[..., Any], checkpoint: bool) -> None:
        if not callable(closure):
            raise ClosureError(f"a closure must be a function, not an object of type {type(closure).__name__}.")
        self.closure = closure
        self.checkpoint = checkpoint
        self.name: Any | str = getattr(closure, "__qualname__", repr(closure))
        functools.update_wrapper(self, closure)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Bind a closure in a class like a method."""
        return self if instance is None else functools.partial(self.__call__, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        trace = session.trace if isinstance(session.trace, StepTrace) else None
        existed = trace.existed if trace is not None else lambda obj: True
        caller = getframe(1)
        site = caller.f_code, caller.f_lasti
        call = ClosureCall(self, here(), site, *taken_apart((args, tuple(kwargs.values())), existed), tuple(kwargs))
        if trace is not None:
            call.note(trace)
        else:
            call.run_now()


@replaces("builtins.print")
def print_later(original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """As `print`; in a traced step, tensors, numbers, texts and shapes are printed after each execution, when they have
    values, and as they are at that call. Other objects are printed only as the step is traced; and to memory, at
    once."""
    trace, file = session.trace, kwargs.get("file")
    if not isinstance(trace, StepTrace):
        original(*args, **kwargs)
        return
    given = [*args, *kwargs.values()]
    args = tuple([printed(arg, trace.numbers) for arg in args])
    kwargs = {name: printed(option, trace.numbers) for name, option in kwargs.items()}
    has_marks = not all(map(operator.is_, given, (*args, *kwargs.values())))
    in_memory = isinstance(sys.stdout if file is None else file, io.StringIO)
    if in_memory and not trace.is_console(file):
        original(*map(_read, args), **{name: _read(option) for name, option in kwargs.items()})
    elif has_marks or any(map(_varies, args)) or trace.is_console(file) and all(map(_is_kept, args)):
        _Closure(original, checkpoint=False)(*args, **kwargs)
    elif trace.prints:
        trace.printed = True
        original(*args, **kwargs)


@replaces("logging.Logger.handle")
def log_later(original: Callable[..., None], self: logging.Logger, record: logging.LogRecord) -> None:
    """As `Logger.handle`; in a traced step, what consists of tensors, numbers and texts is logged after it has run."""
    if not isinstance(session.trace, StepTrace):
        original(self, record)
        return
    record.msg = printed(record.msg, session.trace.numbers)
    if isinstance(record.args, tuple):
        record.args = tuple([printed(arg, session.trace.numbers) for arg in record.args])
    args = list(record.args.values()) if isinstance(record.args, Mapping) else list(record.args or ())
    fields = {name: value for name, value in vars(record).items() if name not in ("msg", "args", "exc_info")}
    if record.exc_info and record.exc_info[0]:  # as a text: an exception refers to frames, and to all that they hold
        fields["exc_text"] = logging.Formatter().formatException(record.exc_info)
    is_of_runtime = record.name.partition(".")[0] in _OF_RUNTIME
    if not is_of_runtime and all(map(_is_kept, [record.msg, *args, *fields.values()])):
        _Closure(functools.partial(_log, functools.partial(original, self)), checkpoint=False)(
            {**fields, "msg": record.msg, "args": record.args}
        )
    else:
        record.msg = _read(record.msg)
        if isinstance(record.args, tuple):
            record.args = tuple(map(_read, record.args))
        original(self, record)


_OF_RUNTIME = ("firstloss", "jax", "jaxlib", "torch")


def _log(handle: Callable[[logging.LogRecord], None], fields: dict[str, Any]) -> None:
    """Log a record with these fields now."""
    record = logging.makeLogRecord(fields)
    now = logging.LogRecord("", 0, "", 0, "", None, None)
    record.created, record.msecs, record.relativeCreated = now.created, now.msecs, now.relativeCreated
    handle(record)


def _read(arg: Any) -> Any:
    """An argument of what is printed at once."""
    return text_of(arg) if type(arg) is InputText else arg


def _varies(arg: Any) -> bool:
    return is_input_number(arg) or type(arg) is DeferredTensor and known_value(arg) is None


_KEPT = (str, bool, type(None), torch.Size, torch.dtype, torch.device)


def _is_kept(arg: Any) -> bool:
    """Whether it is a tensor of the step, or immutable: guarded, or an input."""
    if type(arg) is tuple:
        return all(map(_is_kept, arg))
    return type(arg) in _KEPT or is_plain_number(arg) or _varies(arg) or input_of(arg) is not None


def find_existing(calls: list[ClosureCall], reconstructor: Reconstructor) -> set[Passed]:
    """Once a step is traced: find the arguments of its closures that existed before it. Returns the ids of the objects
    of which none of these calls makes another one, with the places of the calls."""
    found = [each for call in calls for each in call.find_existing(reconstructor)]
    made_anew = {obj for itself, (obj, _, _) in found if not itself}
    return {each for itself, each in found if itself and each[0] not in made_anew}


class ClosureCall:
    """A call of a closure: `leaves` are its arguments, `source` is the user's line."""

    def __init__(
        self, closure: _Closure, source: Source, site: Site, leaves: list[Any], spec: Any, names: tuple[str, ...]
    ) -> None:
        """
        Args:
            site: the instruction that calls it.
            spec, names: how the leaves are put together, and what the last ones are called.
        """
        self._site = site
        self.closure = closure
        self.source = source
        self.leaves = leaves
        self._spec = spec
        self._names = names

    # -- inside a traced step --

    def note(self, trace: StepTrace) -> None:
        """Record the tensor arguments as they are at this point of the step."""
        for i, leaf in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if type(leaf) is DeferredTensor and leaf._storage.trace is not trace:
                    trace.adopt(leaf._storage)
                self.leaves[i] = ref_of(leaf)
            else:
                self.leaves[i] = kept(leaf, trace.existed)
        trace.closures.append(self)

    def find_existing(self, reconstructor: Reconstructor) -> Iterator[tuple[bool, Passed]]:
        """Once the step is traced: find the arguments that existed before it. Yields for each object whether it is
        passed itself, and its id with the place of the call."""
        given = [each for leaf in self.leaves if type(leaf) is not Ref for each in all_in(leaf)]
        self.leaves = [leaf if type(leaf) is Ref else found(leaf, reconstructor) for leaf in self.leaves]
        code, offset = self._site
        for part, key in given:
            yield type(part) is not Container or part.is_passed_itself, (key, code, call_at(code, offset))

    @property
    def refs(self) -> list[Ref]:
        """The tensor arguments of a recorded call."""
        return [leaf for leaf in self.leaves if type(leaf) is Ref]

    def after_step(self, arrays: Sequence[Any], frame: CallFrame) -> None:
        """Queue the call after the step has been dispatched.

        Args:
            arrays: what are, or will be, the values of `refs`.
            frame: of this call of the step.
        """
        fresh, copies = iter(arrays), list[Copy]()
        leaves = [next(fresh) if type(leaf) is Ref else at_call(leaf, frame, copies) for leaf in self.leaves]
        self._queue(leaves, list(arrays), copies)

    # -- outside a step --

    def run_now(self) -> None:
        """Run on the current values."""
        if not self._due():
            return
        if not any(type(leaf) is DeferredTensor for leaf in self.leaves):
            snapshot = loops.current() is not None and not _in_closure()
            leaves = [leaf.detach().clone() if snapshot and isinstance(leaf, torch.Tensor) else leaf
                      for leaf in self.leaves]  # fmt: skip
            self._queue(leaves, [])
            return
        leaves, arrays = [], []
        for leaf in self.leaves:
            if type(leaf) is DeferredTensor and leaf._storage.resident is not None:
                array = leaf._storage.resident.snapshot()
                arrays.append(array)
                leaf = _StoredArray(array, leaf._ref())
            elif isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().clone()
            leaves.append(leaf)
        self._queue(leaves, arrays)

    # -- inside and outside --

    def _queue(self, leaves: list[Any], arrays: list[Any], copies: Sequence[Copy] = ()) -> None:
        loop = None if _in_closure() else loops.current()
        if loop is None:
            if self.closure.checkpoint and not _in_closure():
                raise ClosureError(
                    f"{self.source}: {self.closure.name} is a checkpoint closure, which runs on the checkpoint steps "
                    "of a DataExecutor's loop, but no such loop is running. Loop over "
                    "fl.utils.data.DataExecutor(loader, num_steps=..., checkpoint_steps=...), or call a plain function."
                )
            self._run(leaves, None, copies)
            return
        if not self._due():
            return
        for array in arrays:
            array.copy_to_host_async()
        step = loop.step
        leaves = [leaf if pytree.tree_is_leaf(leaf, is_leaf=is_size) else InLoop(leaf) for leaf in leaves]
        loop.passed += [leaf for leaf in leaves if type(leaf) is InLoop]
        loop.when_ready(arrays, lambda: self._run_later(leaves, step, [*copies], loop.passed))
        if self.closure.checkpoint:
            loop.flush()

    def _due(self) -> bool:
        """Whether it runs at this step of the current loop, if there is one."""
        loop = None if _in_closure() else loops.current()
        if loop is None or self.closure is _assertion:
            return True
        return loop.owner.is_checkpoint_step if self.closure.checkpoint else loop.owner.is_activation_step

    def _run_later(self, leaves: list[Any], step: int, copies: list[Copy], passed: list[InLoop]) -> None:
        """`passed`: those with which closures of the loop were called that have not run."""
        own = [leaf for leaf in leaves if type(leaf) is InLoop]
        passed[:] = [each for each in passed if each not in own]
        unchanged = [each for each in passed if each.is_unchanged()]
        self._run([leaf.now(copies) if type(leaf) is InLoop else leaf for leaf in leaves], step, copies)
        for each in unchanged:
            each.closure_has_run()

    def _run(self, leaves: list[Any], step: int | None, copies: Sequence[Copy]) -> None:
        args, values = pytree.tree_unflatten([_on_host(leaf) for leaf in leaves], self._spec)
        _this_thread.depth += 1
        try:
            self.closure.closure(*args, **dict(zip(self._names, values, strict=True)))
            for copy in copies:
                copy.check(self.closure.name)
        except Exception as error:
            after = "" if step is None else f" after step {step}"
            error.add_note(f"This was raised by the closure {self.closure.name}{after}, called at {self.source}.")
            raise
        finally:
            _this_thread.depth -= 1


def _check(condition: torch.Tensor, message: str, source: Source) -> None:
    if not condition:
        raise StepAssertionError(f"{source}: {message or 'the condition that this line asserts is false'}.")


_assertion = _Closure(_check, checkpoint=False)  # runs after every step, regardless of activation steps
_assertion.name = "torch._assert_async"


def _assert_later(condition: torch.Tensor, message: str = "") -> None:
    _assertion(condition.detach(), message, here())


Hooks.register(assert_later=_assert_later)


class _ThreadLocal(threading.local):
    """The depth of closures running in this thread."""

    depth = 0


_this_thread = _ThreadLocal()


def _in_closure() -> bool:
    return _this_thread.depth > 0


class _StoredArray:
    """The array behind a tensor on the backend, and the tensor's geometry in it."""

    def __init__(self, array: Any, ref: Ref) -> None:
        self.array = array
        self.ref = ref


def _on_host(leaf: Any) -> Any:
    """The argument that a closure receives: for an array, its values in separate memory."""
    if type(leaf) is _StoredArray:
        value: Value = leaf.ref.value
        whole = torch.empty_strided(value.shape, value.stride, dtype=value.dtype).copy_(_values(leaf.array))
        return leaf.ref.view(whole)
    if type(leaf) is LazyArray or hasattr(leaf, "is_ready") and hasattr(leaf, "sharding"):
        return _values(leaf).clone()
    return leaf


def _values(array: Any) -> torch.Tensor:
    if type(array) is LazyArray and array.content is not None:
        return array.content
    from ..jax_support import to_host

    return to_host(ready(array))
