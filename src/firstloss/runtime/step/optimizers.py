"""PyTorch optimizers in traced steps: their state is created before the step, and scheduled numbers are inputs."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...capture import session
from ...capture.new_optimizer_state import CannotRehearse, FirstStepDiffers, is_known
from ...capture.step import StepTrace, storage_key
from ...capture.symbolic_scalars import tensor_of
from ...capture.tensor import DeferredTensor
from ...compat.patches import replaces
from ...compat.torch_names import (
    DisableTorchDispatch,
    global_step_post_hooks,
    global_step_pre_hooks,
    step_post_hooks,
    step_pre_hooks,
)
from ...errors import TraceError, ValueReadError
from ...interpreter import Undo, interruptible_inside
from ...optim import adafactor as _adafactor  # noqa: F401 - for its patches
from ...optim.optimizer import Optimizer
from ...optim.schedule import schedules_of
from ...program.graph import Value, span
from ...program.source import here
from ..backend import current_backend
from ..guards.recording import Recording
from ..guards.snapshot import Snapshot
from .optimizer_state import OptimizerStates, copy_of_state, entries_of, restore_state
from .owners import memory_and_geometry
from .parameter_groups import ParameterGroups, sign_unknown
from .schedulers import Schedulers

# Optimizers whose computation is not a fixed one on dense tensors.
_REFUSED = {
    "LBFGS": (ValueReadError, "evaluates the model as often as values tell it to. AdamW does so once"),
    "SparseAdam": (
        TraceError,
        "takes sparse gradients, which XLA does not support. Use Adam, with an embedding of sparse=False",
    ),
}


class Optimizers:
    """The optimizers that step in a trace.

    Attributes:
        seen: those that have stepped.
        gradients: the gradients that they were given, as whole storages.
        groups: the numbers in their parameter groups.
        state: their state.
        schedulers: PyTorch's schedulers that have stepped.
        schedule_state: the tensors of `firstloss.optim` schedules.
        first_step_only: whether an optimizer's first step, which differs from later ones, was traced.
    """

    def __init__(
        self, trace: StepTrace, snapshot: Snapshot, inputs: tuple[type, ...], keep_fused: bool = False
    ) -> None:
        """
        Args:
            snapshot: taken before the trace.
            inputs: as of `tracing.trace_step`.
            keep_fused: whether the step calls PyTorch's fused kernels if they were asked for.
        """
        self._trace = trace
        self._keep_fused = keep_fused
        self.seen: list[torch.optim.Optimizer] = []
        self.gradients: set[Value] = set()
        self.groups = ParameterGroups(trace, snapshot)
        self.state = OptimizerStates(snapshot)
        self.schedulers = Schedulers(trace, inputs)
        self.schedule_state: list[torch.Tensor] = []
        self.first_step_only: bool = False
        self._rehearsing = False
        self._handles: list[Any] = []
        # (buffer, its old content, whether to update it)
        self._momenta: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counting: list[tuple[dict[str, Any], torch.Tensor]] = []  # (state, its step count)

    def end_trace(self) -> None:
        """End the trace."""
        self.state.end_trace()
        self.groups.end_trace()

    @interruptible_inside
    def watched(self, recording: Recording, snapshot: Snapshot) -> Iterator[None]:
        """Context in which every optimizer is prepared just before its first step; its groups are restored afterwards.

        Args:
            recording: records what the step reads.
            snapshot: was taken before the trace.
        """
        with Undo() as undo, undo:
            undo(self.groups.restore)
            undo(torch.clear_autocast_cache)
            undo(self._narrow)
            undo(self._handles.clear)
            undo(lambda: [handle.remove() for handle in self._handles])
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
            torch.clear_autocast_cache()  # drop casts made elsewhere, which the step would use
            with self.schedulers.watched(recording, snapshot):
                yield

    def check(self) -> None:
        """
        Raises:
            TraceError: if the step sets something in a parameter group that a call could not repeat.
        """
        self.groups.check()
        self.schedulers.check(self.groups.sets)

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepare an optimizer before its step; returns other arguments for the step, or None."""
        if session.trace is None or self._rehearsing:
            return None
        others = None
        closure = kwargs.get("closure") or next(iter(args[1:]), None)
        if callable(closure) and is_known(optimizer) and type(optimizer).__name__ not in _REFUSED:
            with torch.enable_grad():  # they call it once, before anything else
                loss = closure()
            others = (args[:1], {"closure": lambda: loss})
        self._prepare(optimizer, callable(closure) and others is None)
        return others

    def _prepare(self, optimizer: torch.optim.Optimizer, calls_closure: bool) -> None:
        """Prepare an optimizer before its step.

        Args:
            calls_closure: whether the step calls a closure, so that it cannot be rehearsed.
        """
        self.schedulers.before_step(optimizer)
        if not any(seen is optimizer for seen in self.seen):
            self._first_step(optimizer, calls_closure)
        else:
            self.groups.hide(optimizer)
        self._widen(optimizer)
        for group in optimizer.param_groups:
            momentum = group.get("momentum")
            if sign_unknown(momentum):
                for p in group["params"]:
                    buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                    if p.grad is not None and isinstance(buffer, torch.Tensor):
                        self._momenta.append((buffer, buffer.clone(), tensor_of(momentum) != 0))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """With zero momentum, SGD and RMSprop leave their buffers unchanged, unlike a multiplication by zero. A
        scheduled momentum is known only on the device, so this is decided there."""
        if session.trace is None or self._rehearsing:
            return
        self._narrow()
        with torch.no_grad():
            for buffer, before, moves in self._momenta:
                buffer.copy_(torch.where(moves, buffer, before))
        self._momenta.clear()
        self.groups.show(optimizer)

    def _widen(self, optimizer: torch.optim.Optimizer) -> None:
        """Count steps in float32 but compute bias corrections in float64, as eager PyTorch does: in float32 1 - 0.999
        has a relative error of 6e-5."""
        if not is_known(optimizer) or any(group.get("fused") for group in optimizer.param_groups):
            return  # fused kernels do that themselves
        steps = [(table, value) for table, key, value in entries_of(optimizer.state) if key == "step"]
        counts = [(e, c) for e, c in steps if isinstance(c, torch.Tensor) and c.dtype is torch.float32 and not c.dim()]
        if counts:
            zero = torch.zeros((), dtype=torch.float64)
            with torch.no_grad():
                wide = torch._foreach_add([c for _, c in counts], [zero] * len(counts))  # of the wider dtype
            for (entries, count), new in zip(counts, wide, strict=True):
                self._counting.append((entries, count))
                entries["step"] = new

    def _narrow(self) -> None:
        """Update the float32 counts from those that replaced them."""
        wide = [entries["step"] for entries, _ in self._counting]
        for entries, count in self._counting:
            entries["step"] = count
        if self._counting and session.trace is not None:
            with torch.no_grad():
                torch._foreach_copy_([count for _, count in self._counting], wide)
        self._counting.clear()

    def _first_step(self, optimizer: torch.optim.Optimizer, calls_closure: bool) -> None:
        """Prepare an optimizer that has not stepped in this trace yet."""
        name = type(optimizer).__name__
        if name in _REFUSED:
            error, why = _REFUSED[name]
            raise error(f"{here()}: {name} cannot be traced: it {why}.")
        self.seen.append(optimizer)
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.gradients.update(grad._storage.value for grad in grads if type(grad) is DeferredTensor)
        move_state(optimizer, self._trace)
        for schedule in schedules_of(optimizer):
            self.schedule_state.extend(schedule.use_tensors())
        self.groups.add(optimizer)
        one_by_one = _overlaps(optimizer)
        fused: list[torch.Tensor] = []  # weights for which fused kernels were requested
        for group in optimizer.param_groups:
            # capturable: the step count stays a tensor; foreach: one operation per list of weights, not per weight;
            # fused kernels are PyTorch's own for one device, and XLA fuses by itself.
            if group.get("fused"):
                if self._keep_fused:
                    continue
                fused += group["params"]
            if one_by_one and group.get("foreach"):
                raise TraceError(
                    f"{here()}: weights, gradients or state of this {name} overlap in memory, but foreach=True "
                    "updates lists of them, in an order that a traced step does not preserve. Leave foreach out."
                )
            lists = not one_by_one and not _keeps_gradients(group)
            for key, value in (("capturable", True), ("foreach", lists), ("fused", False)):
                if key in group and (key == "capturable" or not group.get("differentiable")):
                    self.groups.replace(group, key, value)
        for group in optimizer.param_groups:
            for key, value in list(group.items()):
                if key not in ("lr", "params"):  # optimizers branch on all of their numbers except the rate
                    self.groups.make_symbolic(optimizer, group, key, value)
        self._rehearsing = True
        hooks = _hooks_of_all()
        is_stock = type(optimizer).__module__.startswith("torch.optim") and not hooks
        snapshot = None if is_stock else Snapshot([optimizer, *hooks])
        try:
            # A custom optimizer may do anything at its first step, so that this has to be its first.
            knows_its_state = is_known(optimizer) or _preinitializes(optimizer)
            if calls_closure or not knows_its_state and self._trace.may_read():
                raise CannotRehearse
            with _without_hooks(optimizer):
                self.state.create(optimizer, lambda: _first_step(optimizer, fused), not knows_its_state)
        except FirstStepDiffers as why:
            # one that cannot be rehearsed is taken to have all its state after its first step
            self.first_step_only = not isinstance(why, CannotRehearse) or optimizer not in _stepped
            _stepped.add(optimizer)
            if any(sign_unknown(group.get("momentum")) for group in optimizer.param_groups):
                raise TraceError(
                    f"{here()}: the momentum of this {name} is a tensor, and it has dampening: its buffer starts as "
                    "the undamped gradient in the first step with a nonzero momentum, which only the device "
                    "knows. Leave dampening out, or change the momentum between steps, as a number."
                ) from None
        finally:
            self._rehearsing = False
            if snapshot is not None:  # the optimizer's own code has not counted steps
                created = copy_of_state(optimizer)
                snapshot.undo()
                restore_state(optimizer, created)
        self.groups.make_inputs(optimizer)
        self.state.add(optimizer)


def _keeps_gradients(group: dict[str, Any]) -> bool:
    """Whether PyTorch's loop over weights keeps their gradients while its foreach operations do not: SGD with only
    Nesterov momentum adds the momentum to them in place."""
    decay = group.get("weight_decay")
    copied = group.get("maximize") or isinstance(decay, (int, float)) and decay != 0
    return bool(group.get("nesterov") and not copied and not group.get("foreach"))


def _overlaps(optimizer: torch.optim.Optimizer) -> bool:
    """Whether weights, gradients or state overlap in memory, so that the order of updates matters: foreach operations
    read everything before they write."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = [t for p in weights for t in (p, p.grad)] + [value for _, _, value in entries_of(optimizer.state)]
    strided = [t for t in tensors if isinstance(t, torch.Tensor) and t.layout == torch.strided and t.numel()]
    extents = sorted(map(_extent, strided))
    return any(a[0] == b[0] and b[1] < a[2] for a, b in itertools.pairwise(extents))


def _extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A tensor's storage, and its range of bytes in that."""
    memory, (size, stride, offset, dtype) = memory_and_geometry(tensor)
    return memory, offset * dtype.itemsize, (offset + span(size, stride)) * dtype.itemsize


@replaces("torch.amp.GradScaler.scale")
def scale(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """An error for PyTorch's loss scaler, which decides on the host whether to step: use Firstloss's. A disabled one
    does nothing."""
    if session.trace is None or not self.is_enabled():
        return original(self, *args, **kwargs)
    raise ValueReadError(
        f"{here()}: torch.amp.GradScaler reads a value to decide whether to step. firstloss.amp.GradScaler has the "
        "same calls, and decides in the compiled step itself."
    )


def _first_step(optimizer: torch.optim.Optimizer, fused: Iterable[torch.Tensor]) -> None:
    """
    Args:
        fused: weights whose steps are counted in float32.
    """
    if _preinitializes(optimizer) and not any(optimizer.state.values()):
        optimizer.preinitialize()  # type: ignore[attr-defined]
    with_step = {id(p) for p, entries in optimizer.state.items() if isinstance(entries, dict) and "step" in entries}
    optimizer.step()
    for p in fused:
        count = optimizer.state[p].get("step") if p in optimizer.state and id(p) not in with_step else None
        if isinstance(count, torch.Tensor) and count.dtype is not torch.float32:
            optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=count.device)


def _preinitializes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it says what state it starts with."""
    return isinstance(optimizer, Optimizer) and type(optimizer).preinitialize is not Optimizer.preinitialize


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context without the optimizer's step hooks."""
    tables: list[Any] = [step_pre_hooks(optimizer), step_post_hooks(optimizer)]
    with Undo() as undo, undo:
        for table in tables:
            undo(table.update, list(table.items()))
            table.clear()
        yield


def _hooks_of_all() -> list[Callable[..., Any]]:
    """The global step hooks of optimizers."""
    tables = (global_step_pre_hooks, global_step_post_hooks)
    hooks = [hook for table in tables for hook in list(table.values())]
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), Optimizers)]


_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # those that could not be rehearsed


def move_state(optimizer: torch.optim.Optimizer, trace: StepTrace) -> None:
    """Move the state of `optimizer` to the backend. `trace` is that of the step that steps it.

    What `optimizer.load_state_dict` loads becomes the state, as in `torch.optim` (whoever holds it sees it change).
    With it the groups are new, so that the step is traced again.
    """
    held = [value for _, _, value in entries_of(optimizer.state) if type(value) is torch.Tensor]
    inputs = {storage_key(owner) for owner in trace.inputs.values() if isinstance(owner, torch.Tensor)}
    state = [v for v in held if storage_key(v) not in inputs]  # unless the step has used it where it is
    backend = current_backend()
    with DisableTorchDispatch(), torch.no_grad():  # not part of the step being traced
        if backend.mesh is not None:
            backend.mesh.follow(optimizer.state, [optimizer])
        backend.move_to_device(state)
