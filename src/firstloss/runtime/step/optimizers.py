"""Stock optimizers inside a traced step: their state exists before it, and what a schedule changes is an input."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...capture import session
from ...capture.recorder import DeferredTensor
from ...capture.scalars import Hyperparameter as TracedHyperparameter
from ...capture.scalars import tensor_of
from ...capture.step import PLAIN, FirstStepDiffers, StepTrace, find_new_state, is_traced
from ...compat.patches import replaces
from ...compat.torch_names import (
    DisableTorchDispatch,
    global_step_post_hooks,
    global_step_pre_hooks,
    step_post_hooks,
    step_pre_hooks,
)
from ...errors import TraceError
from ...optim.adafactor import without_reads
from ...optim.optimizer import Optimizer
from ...optim.schedule import schedules_of
from ...program.source import here
from ...undo import Undo
from ..guards.bindings import Bind
from ..guards.effects import Effects
from ..guards.left import Env, Left, Make
from ..guards.recording import Recording
from ..guards.snapshot import Snapshot
from .reload import load_in_place
from .schedulers import Schedulers

# What these do cannot be one fixed computation on dense tensors.
_REFUSED = {
    "LBFGS": "evaluates the model as often as its line search likes. Use AdamW, or run LBFGS on backend 'CPU'",
    "SparseAdam": "takes sparse gradients, which XLA does not have. Use Adam, with an embedding of sparse=False",
}

# For an optimizer, the numbers in its groups that have been seen to change: (group, key).
_varying: weakref.WeakKeyDictionary[torch.optim.Optimizer, set[tuple[int, str]]] = weakref.WeakKeyDictionary()


class Hyperparameter(NamedTuple):
    """A number in a parameter group that a step reads anew each time; `place` is its index, where the group has a tuple
    such as betas."""

    group: dict[str, Any]
    key: str
    place: int | None

    def read(self) -> float:
        """The number as it is now."""
        value = self.group[self.key]
        return float(value if self.place is None else value[self.place])

    def premise(self) -> Any:
        """What the trace takes for granted of it: that it is a number, or so many, and but for a rate, its sign, by
        which optimizers branch."""
        value = self.group.get(self.key)
        if not _is_number(value) and not (isinstance(value, tuple) and all(map(_is_number, value))):
            return None
        return len(value) if isinstance(value, tuple) else 0, None if self.key == "lr" else _sign(self.read())


class Optimizers:
    """The optimizers that step inside one trace.

    Attributes:
        seen: those that have stepped.
        new_state: the state that their first step would make, made before it.
        schedulers: PyTorch's, that have stepped.
        schedule_state: the tensors of `firstloss.optim` schedules.
        hyperparameters: the inputs of the step that are numbers in parameter groups.
        counts: what one of them changes in Python, in words.
        first_step_only: an optimizer's first step is another computation than the ones after it, and was traced.
    """

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace
        self.seen: list[torch.optim.Optimizer] = []
        self.new_state: list[torch.Tensor] = []
        self.schedule_state: list[torch.Tensor] = []
        self.hyperparameters: dict[Any, Hyperparameter] = {}
        self.schedulers = Schedulers()
        self.first_step_only = False
        self.counts: str | None = None
        self._restore: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._numbers: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._rehearsing = False
        self._handles: list[Any] = []
        self._baked: dict[Any, Any] = {}
        self._signs: list[tuple[torch.Tensor, int]] = []  # of tensors in groups, by which optimizers have branched
        self._params: list[tuple[dict[str, Any], list[torch.Tensor]]] = []
        self._momenta: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # buffer, as it was, whether to move
        self._counting: list[tuple[dict[str, Any], torch.Tensor]] = []  # their state, and its count of steps
        self._entries: list[tuple[dict[str, Any], str, Any]] = []  # of state, before the step's own changes
        self._had: list[tuple[torch.optim.Optimizer, dict[torch.Tensor, set[str]]]] = []  # state, likewise
        self._state: list[StateOf] = []

    @contextmanager
    def watched(self, recording: Recording) -> Iterator[None]:
        """Prepare every optimizer just before its first step in the block; afterwards their groups are as before.

        Args:
            recording: what the step reads.
        """
        changed: list[str] = []
        with Undo() as undo, undo:
            undo(lambda: changed.extend(self._restore_groups()))
            undo(torch.clear_autocast_cache)
            undo(self._narrow)
            undo(self._handles.clear)
            undo(lambda: [handle.remove() for handle in self._handles])
            self._handles.append(register_optimizer_step_pre_hook(self._before_step))
            self._handles.append(register_optimizer_step_post_hook(self._after_step))
            torch.clear_autocast_cache()  # of casts made elsewhere, which the step would go on with
            with (
                without_reads(),
                self.schedulers.watched(recording.times_read),
            ):
                yield
        if changed:
            raise TraceError(
                f"the traced step sets {changed[0]!r} in a parameter group from Python, which happens only once, while "
                "it is traced. Set it outside of the traced step, or use a schedule from firstloss.optim.lr_scheduler, "
                "which is a function of a step tensor; an optimizer of your own counts in a tensor in its state."
            )
        self._baked = self._constants()

    def _restore_groups(self) -> list[str]:
        """Put the groups back as they were before the step; returns what the step's Python has changed in them."""
        changed: list[str] = []
        for group, key, before, ours in reversed(self._restore):
            if group[key] is not ours or _written(ours):
                changed.append(key)
            group[key] = before
        for group, numbers in self._numbers:
            now = {key: value for key, value in group.items() if _is_number(value)}
            changed += [key for key, value in now.items() if numbers.get(key) != value]
            for key in now.keys() - numbers.keys():
                del group[key]
            group.update(numbers)
        return changed

    def outdated(self) -> bool:
        """Whether the executable is right no longer: a number baked into it has been changed since. What changes once
        may change again, so it will be an input of the next one."""
        if any(state.replaced() for state in self._state) or self._regrouped():
            return True
        if any(_sign(float(tensor)) != sign for tensor, sign in self._signs):
            return True
        now = self._constants()
        found = now != self._baked
        for number, optimizer in enumerate(self.seen):
            varying = _varying.get(optimizer, set())
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    place = number, i, key
                    if place not in self._baked or not _may_vary(optimizer, value):
                        continue
                    if self._baked[place] != now[place]:
                        if not varying:
                            varying = _varying.setdefault(optimizer, varying)
                        varying.add((i, key))
                    found |= (i, key) in varying  # an input of a later executable, which does for this value too
        return found

    def _regrouped(self) -> bool:
        """Whether the groups, or the weights in them, are others or in another order."""
        groups = [group for optimizer in self.seen for group in optimizer.param_groups]
        if len(groups) != len(self._params):
            return True
        for group, (before, weights) in zip(groups, self._params, strict=True):
            now = group["params"]
            if group is not before or len(now) != len(weights) or not all(map(operator.is_, now, weights)):
                return True
        return False

    def forget_new_state(self) -> None:
        """The step could not be traced: what it has made is no state."""
        for optimizer in self.seen:
            for entries in optimizer.state.values():
                made = [
                    k for k, v in entries.items() if any(v is n for n in self.new_state) or is_traced(v, self._trace)
                ]
                for key in made:
                    del entries[key]

    def traced(self, effects: Effects, left: Left, move: Callable[[list[tuple[Any, Any]]], bool]) -> None:
        """State that `step()` has bound to another tensor: each call binds a new one, which the next one reads.

        Args:
            move: tells the executable which tensor stands now where another did.
        """
        self.schedulers.traced(effects, left)
        for entries, key, old in self._entries:
            new = entries.get(key)
            if isinstance(old, PLAIN):
                if new is not old and (type(new) is not type(old) or new != old):
                    self.counts = self.counts or f"its optimizer changes a Python number, state[{key!r}]"
                    effects.also(
                        functools.partial(operator.setitem, entries, key, old),
                        _constantly(functools.partial(operator.setitem, entries, key, new)),
                    )
            elif new is not old and isinstance(new, torch.Tensor):
                effects.also(
                    functools.partial(operator.setitem, entries, key, old),
                    functools.partial(self._bind, entries, key, left.make(new), move),
                )

        for optimizer, had in self._had:
            for p, entries in list(optimizer.state.items()):
                for key in [key for key in entries if key not in had.get(p, ())]:
                    undo = functools.partial(_forget_entry, optimizer, p, key, p in had)
                    effects.also(undo, functools.partial(_new_entry, optimizer, p, key, left.make(entries[key])))

    def _bind(self, entries: dict[str, Any], key: str, make: Make, move: Any, env: Env) -> Bind:
        new = make(env)

        def bind() -> None:
            old = entries[key]
            entries[key] = new
            if old is not new and old.shape == new.shape and old.dtype == new.dtype and move([(old, new)]):
                for state in self._state:
                    state.follow(entries, key, new)

        return bind

    def settled(self) -> None:
        """The trace has ended: the state that there is now is what the executable works on."""
        self._state = [StateOf(optimizer) for optimizer in self.seen]
        self._params = [(group, list(group["params"])) for o in self.seen for group in o.param_groups]

    def _constants(self) -> dict[Any, Any]:
        """What is baked into the trace: all in the groups but the weights and the inputs, and of the inputs what it
        takes for granted. A tensor that the step reads is known by which it is; one that a step itself puts there is
        not compared."""
        inputs = {(id(h.group), h.key) for h in self.hyperparameters.values()}
        found: dict[Any, Any] = {i: h.premise() for i, h in enumerate(self.hyperparameters.values())}
        for number, optimizer in enumerate(self.seen):
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if key == "params" or (id(group), key) in inputs or _is_dead(value):
                        continue
                    plain = type(value) in _PLAIN
                    found[number, i, key] = value if plain else _frozen(value)
        return found

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        if session.trace is None or self._rehearsing:
            return
        self.schedulers.before_step(optimizer)
        if not any(seen is optimizer for seen in self.seen):
            self._first_step(optimizer, args, kwargs)
        self._widen(optimizer)
        for group in optimizer.param_groups:
            momentum = group.get("momentum")
            if _sign_unknown(momentum):
                for p in group["params"]:
                    buffer = optimizer.state.get(p, {}).get("momentum_buffer")
                    if p.grad is not None and isinstance(buffer, torch.Tensor):
                        self._momenta.append((buffer, buffer.clone(), tensor_of(momentum) != 0))

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """With a momentum of zero SGD and RMSprop leave their buffers as they are, which is not what multiplying by
        zero makes of them. What a schedule sets is known on the device alone, so this is decided there."""
        if session.trace is None or self._rehearsing:
            return
        self._narrow()
        with torch.no_grad():
            for buffer, before, moves in self._momenta:
                buffer.copy_(torch.where(moves, buffer, before))
        self._momenta.clear()

    def _widen(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps are counted in float32, and bias corrections computed in float64, as eager PyTorch does it: in float32
        1 - 0.999 is off by 6e-5 of itself."""
        if not _is_known(optimizer):
            return
        found = [(e, e.get("step")) for e in optimizer.state.values()]
        counts = [(e, c) for e, c in found if isinstance(c, torch.Tensor) and c.dtype is torch.float32 and not c.dim()]
        if counts:
            zero = torch.zeros((), dtype=torch.float64)
            with torch.no_grad():
                wide = torch._foreach_add([c for _, c in counts], [zero] * len(counts))  # of the wider dtype
            for (entries, count), new in zip(counts, wide, strict=True):
                self._counting.append((entries, count))
                entries["step"] = new

    def _narrow(self) -> None:
        """The count in float32 is as far as the one that took its place."""
        wide = [entries["step"] for entries, _ in self._counting]
        for entries, count in self._counting:
            entries["step"] = count
        if self._counting and session.trace is not None:
            with torch.no_grad():
                torch._foreach_copy_([count for _, count in self._counting], wide)
        self._counting.clear()

    def _first_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        """Prepare an optimizer that has not stepped in this trace yet."""
        name = type(optimizer).__name__
        if name in _REFUSED:
            raise TraceError(f"{name} cannot be traced: it {_REFUSED[name]}.")
        if kwargs.get("closure") is not None or len(args) > 1 and callable(args[1]):
            raise TraceError(
                f"{name}.step(closure) runs forward and backward as often as it likes, which a "
                "traced step cannot. Compute the loss first, then call step() without a closure."
            )
        self.seen.append(optimizer)
        load_in_place(optimizer)
        for schedule in schedules_of(optimizer):
            self.schedule_state.extend(schedule.use_tensors())
        for group in optimizer.param_groups:
            self._numbers.append((group, {key: value for key, value in group.items() if _is_number(value)}))
        fused: list[torch.Tensor] = []  # weights for which PyTorch's fused kernels were asked
        for group in optimizer.param_groups:
            # capturable: the step count stays a tensor; foreach: one operation a list of weights, not one a weight;
            # the fused kernels are PyTorch's own for one device, and XLA fuses by itself.
            if group.get("fused"):
                fused += group["params"]
            for key, value in (("capturable", True), ("foreach", True), ("fused", False)):
                if key in group and (key == "capturable" or not group.get("differentiable")):
                    self._set(group, key, value)
        for group in optimizer.param_groups:
            for key, value in list(group.items()):
                if key not in ("lr", "params"):  # optimizers branch on all of their numbers but the rate
                    self._make_symbolic(optimizer, group, key, value)
        self._rehearsing = True
        hooks = _hooks_of_all()
        known = type(optimizer).__module__.startswith("torch.optim") and not hooks
        around = None if known else Snapshot([optimizer, *hooks])
        try:
            with _without_hooks(optimizer):
                self.new_state.extend(find_new_state(optimizer, lambda: _first_step(optimizer, fused)).values())
        except FirstStepDiffers:
            self.first_step_only = True
            if any(_sign_unknown(group.get("momentum")) for group in optimizer.param_groups):
                raise TraceError(
                    f"{here()}: the momentum of this {name} is a tensor, and it has dampening: its momentum begins as "
                    "the first gradient, undamped, in the first step in which it is not zero, which only the device "
                    "knows. Leave dampening out, or change the momentum between steps, as a number."
                ) from None
        finally:
            self._rehearsing = False
            if around is not None:  # what the user's own code counts, it has not counted
                Effects(around, None, Left(lambda tensor: False, around.holds)).undo()
        for i, group in enumerate(optimizer.param_groups):
            for key in list(group):
                self._make_input(optimizer, i, key)
        for entries in optimizer.state.values():
            kept = (torch.Tensor, *PLAIN)
            self._entries += [(entries, key, value) for key, value in entries.items() if isinstance(value, kept)]
        self._had.append((optimizer, {p: set(entries) for p, entries in optimizer.state.items()}))

    def _make_symbolic(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], key: str, value: Any) -> None:
        """A tensor stands where the optimizer expects a number: a schedule's, or the user's own."""
        schedules = [value for schedule in schedules_of(optimizer) for value in schedule.numbers()]

        def symbolic(part: Any) -> Any:
            if not isinstance(part, torch.Tensor) or part.numel() != 1 or part.dtype.is_complex:
                return part
            if any(part is value for value in schedules):
                return _symbolic(part)
            if not _is_known(optimizer) or key not in optimizer.defaults:
                return part  # the optimizer's own code takes the tensor as it is
            sign = None
            if type(part) is not DeferredTensor and self._trace.unwritten(part):
                with DisableTorchDispatch():
                    sign = _sign(float(part))
                self._signs.append((part, sign))
            with torch.no_grad():
                return _symbolic(part.detach().reshape(()).double(), sign)

        made = tuple(map(symbolic, value)) if isinstance(value, tuple) else symbolic(value)
        if made is not value and (not isinstance(value, tuple) or not all(map(operator.is_, made, value))):
            self._set(group, key, made)

    def _make_input(self, optimizer: torch.optim.Optimizer, index: int, key: str) -> None:
        """The learning rate, and what changes besides, is read anew at each step."""
        group = optimizer.param_groups[index]
        value = group[key]
        if key == "lr" and _is_number(value):
            self._set(group, key, self._input(group, key))
        elif (index, key) in _varying.get(optimizer, ()):
            if _is_number(value):
                self._set(group, key, _symbolic(self._input(group, key), _sign(value)))
            elif isinstance(value, tuple) and all(map(_is_number, value)):
                made = [_symbolic(self._input(group, key, i), _sign(v)) for i, v in enumerate(value)]
                self._set(group, key, tuple(made))
        elif "max_momentum" in group and _may_vary(optimizer, value):  # OneCycleLR and CyclicLR leave it there
            if key == "momentum":
                self._set(group, key, _symbolic(self._input(group, key), _sign(value)))
            elif key == "betas":
                self._set(group, key, (_symbolic(self._input(group, key, 0), _sign(value[0])), *value[1:]))

    def _input(self, group: dict[str, Any], key: str, place: int | None = None) -> DeferredTensor:
        label = f"{key}{len(self.hyperparameters)}"
        made = self._trace.new_input(torch.zeros((), dtype=torch.float64), label)
        self.hyperparameters[made._store.value] = Hyperparameter(group, key, place)
        return made

    def _set(self, group: dict[str, Any], key: str, value: Any) -> None:
        self._restore.append((group, key, group[key], value))
        group[key] = value


class StateOf:
    """The objects in an optimizer's state, to see whether somebody has put others in their place."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        state = optimizer.state
        self._weights = list(state)
        self._entries = list(state.values())
        self._tables = [entries for entries in self._entries for _ in entries]
        self._keys = [key for entries in self._entries for key in entries]
        self._values = [value for entries in self._entries for value in entries.values()]

    def follow(self, entries: dict[str, Any], key: str, new: Any) -> None:
        """The step itself has bound an entry to another object."""
        for i, (table, name) in enumerate(zip(self._tables, self._keys, strict=True)):
            if table is entries and name == key:
                self._values[i] = new

    def replaced(self) -> bool:
        """Whether an entry is another object than it was."""
        state = self._optimizer.state
        if len(state) == len(self._entries) and all(map(operator.is_, state.values(), self._entries)):
            try:
                return not all(map(operator.is_, map(operator.getitem, self._tables, self._keys), self._values))
            except KeyError:
                return True
        now = StateOf(self._optimizer)  # load_state_dict makes new dicts, and keeps what is in them (`reload.py`)
        pairs = [(self._weights, now._weights), (self._keys, now._keys), (self._values, now._values)]
        if any(len(a) != len(b) or not all(map(_same, a, b)) for a, b in pairs):
            return True
        self.__dict__.update(now.__dict__)
        return False


def _same(a: Any, b: Any) -> bool:
    return a is b or isinstance(a, str) and a == b


@replaces("torch.amp.GradScaler.scale")
def scale(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's loss scaler decides on the host whether to step: an error that says what to use."""
    if session.trace is None:
        return original(self, *args, **kwargs)
    raise TraceError(
        f"{here()}: torch.amp.GradScaler reads a value to decide whether to step, and a traced step has none. Use "
        "firstloss.amp.GradScaler, which has the same calls and decides in the step itself."
    )


def _first_step(optimizer: torch.optim.Optimizer, fused: Iterable[torch.Tensor]) -> None:
    """
    Args:
        fused: weights whose steps are counted in float32.
    """
    own = isinstance(optimizer, Optimizer) and type(optimizer).preinitialize is not Optimizer.preinitialize
    if own and not any(optimizer.state.values()):
        optimizer.preinitialize()  # type: ignore[attr-defined]
    had = {id(p) for p, entries in optimizer.state.items() if "step" in entries}
    optimizer.step()
    for p in fused:
        count = optimizer.state[p].get("step") if p in optimizer.state and id(p) not in had else None
        if isinstance(count, torch.Tensor) and count.dtype is not torch.float32:
            optimizer.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=count.device)


@contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, what others do before and after its steps is left out."""
    tables: list[Any] = [step_pre_hooks(optimizer), step_post_hooks(optimizer)]
    with Undo() as undo, undo:
        for table in tables:
            undo(table.update, list(table.items()))
            table.clear()
        yield


def _hooks_of_all() -> list[Callable[..., Any]]:
    """What others do before and after the steps of every optimizer."""
    tables = (global_step_pre_hooks, global_step_post_hooks)
    hooks = [hook for table in tables for hook in list(table.values())]
    return [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), Optimizers)]


def _forget_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, had: bool) -> None:
    optimizer.state.get(p, {}).pop(key, None)
    if not had and not optimizer.state.get(p, True):
        del optimizer.state[p]


def _new_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, make: Make, env: Env) -> Bind:
    new = make(env)

    def bind() -> None:
        optimizer.state.setdefault(p, {})[key] = new

    return bind


def _constantly(bind: Bind) -> Callable[[Env], Bind]:
    return lambda env: bind


def _symbolic(number: torch.Tensor, sign: int | None = None) -> torch.SymFloat:
    return torch.SymFloat(TracedHyperparameter(number, sign))


def _sign_unknown(number: Any) -> bool:
    return type(number) is torch.SymFloat and type(number.node) is TracedHyperparameter and number.node.sign is None


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)


_PLAIN = (float, bool, int, str, type(None))


class _Same:
    """Equal to another that holds the same object."""

    def __init__(self, held: Any) -> None:
        self._held = held

    def __eq__(self, other: Any) -> bool:
        return type(other) is _Same and other._held is self._held

    __hash__ = None  # type: ignore[assignment]


def _frozen(value: Any) -> Any:
    """`value`, to compare with what it is later: tensors by identity, lists as they are now."""
    if isinstance(value, torch.Tensor):
        return _Same(value)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, *map(_frozen, value)
    if isinstance(value, dict):
        return "dict", *((key, _frozen(entry)) for key, entry in value.items())
    return value if isinstance(value, _HASHABLE) else _Same(value)


_HASHABLE = (*_PLAIN, complex, bytes, torch.dtype, torch.device, torch.Size, frozenset)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is PyTorch's or Firstloss's."""
    return type(optimizer).__module__.startswith(("torch.optim", "firstloss.optim"))


def _may_vary(optimizer: torch.optim.Optimizer, value: Any) -> bool:
    """Whether a number in a group can be an input. PyTorch's optimizers branch on theirs only to leave out a term that
    a zero makes vanish; what others do is not known, and they are traced anew."""
    if not _is_known(optimizer):
        return False
    return type(value) is float or isinstance(value, tuple) and bool(value) and all(map(_is_number, value))


def _written(value: Any) -> bool:
    """Whether the step has written to the tensor that stands for a number in a group."""
    return type(value) is DeferredTensor and value._store.value.node is not None


def _is_dead(value: Any) -> bool:
    return type(value) is DeferredTensor and value._store.trace is not None and value._store.resident is None
