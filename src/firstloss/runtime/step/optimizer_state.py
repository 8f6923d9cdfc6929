"""Optimizer state in a traced step: rebound entries, tensors replaced by user code, and loading in place."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ...capture.new_optimizer_state import PLAIN
from ...capture.step import StepTrace, is_traced, storage_key
from ...compat.torch_names import DisableTorchDispatch
from ..backend import current_backend
from ..guards.effects import Bind, Effects, always
from ..guards.reconstruct import CallFrame, Make, Reconstructor


class OptimizerStates:
    """The state of the optimizers that step in a trace.

    Attributes:
        new: state that their first steps would create, created before them.
        counts: a Python number that one of them changes, in words.
    """

    def __init__(self, trace: StepTrace, seen: list[torch.optim.Optimizer]) -> None:
        """`seen` lists the optimizers as they step."""
        self._trace = trace
        self._seen = seen
        self.new: list[torch.Tensor] = []
        self.counts: str | None = None
        self._entries: list[tuple[dict[str, Any], str, Any]] = []  # entries before the step
        self._had: list[tuple[torch.optim.Optimizer, dict[torch.Tensor, set[str]]]] = []  # keys before the step
        self._states: list[StateOf] = []

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer's state before its first step."""
        for entries in optimizer.state.values():
            saved = (torch.Tensor, *PLAIN)
            self._entries += [(entries, key, value) for key, value in entries.items() if isinstance(value, saved)]
        self._had.append((optimizer, {p: set(entries) for p, entries in optimizer.state.items()}))

    def traced(self, effects: Effects, left: Reconstructor, move: Callable[[list[tuple[Any, Any]]], bool]) -> None:
        """Record state that `step()` has bound to other tensors: each call binds a new one, which the next call reads.

        Args:
            move: tells the step which tensor has replaced another.
        """
        for entries, key, old in self._entries:
            new = entries.get(key)
            if isinstance(old, PLAIN):
                if new is not old and (type(new) is not type(old) or new != old):
                    self.counts = self.counts or f"its optimizer changes a Python number, state[{key!r}]"
                    effects.add(
                        functools.partial(operator.setitem, entries, key, old),
                        always(functools.partial(operator.setitem, entries, key, new)),
                    )
            elif new is not old and isinstance(new, torch.Tensor):
                effects.add(
                    functools.partial(operator.setitem, entries, key, old),
                    functools.partial(self._bind, entries, key, left.make(new), move),
                )

        for optimizer, had in self._had:
            for p, entries in list(optimizer.state.items()):
                for key in [key for key in entries if key not in had.get(p, ())]:
                    undo = functools.partial(_forget_entry, optimizer, p, key, p in had)
                    effects.add(undo, functools.partial(_new_entry, optimizer, p, key, left.make(entries[key])))

    def _bind(self, entries: dict[str, Any], key: str, make: Make, move: Any, env: CallFrame) -> Bind:
        new = make(env)

        def bind() -> None:
            old = entries[key]
            entries[key] = new
            if old is not new and old.shape == new.shape and old.dtype == new.dtype and move([(old, new)]):
                for state in self._states:
                    state.follow(entries, key, new)

        return bind

    def settled(self) -> None:
        """Note at the end of the trace that the current state is what the step works on."""
        self._states = [StateOf(optimizer) for optimizer in self._seen]

    def replaced(self) -> bool:
        """Whether user code has replaced tensors in the state."""
        return any(state.replaced() for state in self._states)

    def forget_new(self) -> None:
        """Drop the state created for a step that could not be traced."""
        new = set(map(id, self.new))
        for optimizer in self._seen:
            for entries in optimizer.state.values():
                made = [k for k, v in entries.items() if id(v) in new or is_traced(v, self._trace)]
                for key in made:
                    del entries[key]


class StateOf:
    """The objects in an optimizer's state, to detect whether they are replaced."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        state = optimizer.state
        self._weights = list(state)
        self._entries = list(state.values())
        tables = [entries for entries in self._entries if isinstance(entries, dict)]  # others are rejected
        self._tables = [entries for entries in tables for _ in entries]
        self._keys = [key for entries in tables for key in entries]
        self._values = [value for entries in tables for value in entries.values()]

    def follow(self, entries: dict[str, Any], key: str, new: Any) -> None:
        """Note that the step itself has bound an entry to another object."""
        for i, (table, name) in enumerate(zip(self._tables, self._keys, strict=True)):
            if table is entries and name == key:
                self._values[i] = new

    def replaced(self) -> bool:
        """Whether an entry is another object than before."""
        state = self._optimizer.state
        if len(state) == len(self._entries) and all(map(operator.is_, state.values(), self._entries)):
            try:
                return not all(map(operator.is_, map(operator.getitem, self._tables, self._keys), self._values))
            except KeyError:
                return True
        now = StateOf(self._optimizer)  # load_state_dict makes new dicts with the same tensors
        pairs = [(self._weights, now._weights), (self._keys, now._keys), (self._values, now._values)]
        if any(len(a) != len(b) or not all(map(_same, a, b)) for a, b in pairs):
            return True
        self.__dict__.update(now.__dict__)
        return False


def _same(a: Any, b: Any) -> bool:
    return a is b or isinstance(a, str) and a == b


def _forget_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, had: bool) -> None:
    optimizer.state.get(p, {}).pop(key, None)
    if not had and not optimizer.state.get(p, True):
        del optimizer.state[p]


def _new_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, make: Make, env: CallFrame) -> Bind:
    new = make(env)

    def bind() -> None:
        optimizer.state.setdefault(p, {})[key] = new

    return bind


_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def load_in_place(optimizer: torch.optim.Optimizer, trace: StepTrace) -> None:
    """Move the state of `optimizer` to the backend, and keep it there. `trace` is that of the step that steps it.

    From here on, on a mesh, `optimizer.load_state_dict` keeps the state's tensors and copies into them. Otherwise the
    loaded tensors become the state, as in `torch.optim` (whoever holds them sees them change). Either way its groups
    are new, and the step is traced again.
    """
    held = [v for entries in optimizer.state.values() for v in entries.values() if type(v) is torch.Tensor]
    met = {storage_key(owner) for owner in trace.inputs.values() if isinstance(owner, torch.Tensor)}
    state = [v for v in held if storage_key(v) not in met]  # unless the step has used it where it is
    backend = current_backend()
    with DisableTorchDispatch(), torch.no_grad():  # not part of the step being traced
        if backend.mesh is not None:
            backend.mesh.follow(optimizer.state, [optimizer])
        backend.move_to_device(state)
    if optimizer in _watched:
        return
    _watched.add(optimizer)
    before: dict[Any, dict[str, Any]] = {}

    def remember(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        before.update({parameter: dict(entries) for parameter, entries in optimizer.state.items()})

    def copy_back(optimizer: torch.optim.Optimizer) -> None:
        for parameter, entries in optimizer.state.items() if backend.mesh is not None else ():
            for key, new in entries.items():
                old = before.get(parameter, {}).get(key)
                if not isinstance(old, torch.Tensor):
                    continue
                if isinstance(new, torch.Tensor) and new.shape == old.shape:
                    with torch.no_grad():
                        entries[key] = old.copy_(new)
        before.clear()

    optimizer.register_load_state_dict_pre_hook(remember)
    optimizer.register_load_state_dict_post_hook(copy_back)
