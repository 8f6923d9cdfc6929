"""The state of optimizers in a traced step: entries may be rebound by the step, and replaced by user code."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ...capture.input_numbers import is_input_number, is_plain_number, plain
from ...capture.new_optimizer_state import PLAIN
from ...capture.step import StepTrace
from ..guards.effects import Bind, Effects, setting
from ..guards.equality import same
from ..guards.places import Place
from ..guards.reconstruct import CallFrame, Make, Reconstructor
from ..guards.snapshot import Snapshot


def entries_of(state: dict[Any, Any]) -> Iterator[tuple[dict[Any, Any], Any, Any]]:
    """The entries of an optimizer's state, each with its table and key: in a weight's dict, or in the state itself."""
    for key, held in state.items():
        if isinstance(held, dict):
            for name, value in held.items():
                yield held, name, value
        else:
            yield state, key, held


def _keys_of(state: dict[Any, Any]) -> dict[Any, set[Any]]:
    """The keys of an optimizer's state, with those of the dicts there."""
    return {key: set(held) if isinstance(held, dict) else set() for key, held in state.items()}


class OptimizerStates:
    """The state of the optimizers that step in a trace.

    Attributes:
        new: state that their first steps would create, created before them.
        counts: a Python number that one of them changes, in words.
    """

    def __init__(
        self, trace: StepTrace, seen: list[torch.optim.Optimizer], before: Iterable[torch.optim.Optimizer]
    ) -> None:
        """To be created before the step is traced.

        Args:
            seen: the optimizers as they step.
            before: those that there are before.
        """
        self._trace = trace
        self._seen = seen
        self.new: list[torch.Tensor] = []
        self.counts: str | None = None
        self.numbers: list[tuple[Place, Any]] = []  # numbers that one of them changes, before the step
        self._entries: list[tuple[dict[str, Any], str, Any]] = []  # entries before the step
        self._before: list[tuple[torch.optim.Optimizer, dict[torch.Tensor, set[str]]]] = []  # keys before the step
        self._states: list[StateOf] = []
        # By weight, the entries, and a copy of what is in them.
        self._held = [
            (optimizer, {p: (e, dict(e) if isinstance(e, dict) else None) for p, e in optimizer.state.items()})
            for optimizer in before
        ]

    def save(self, optimizer: torch.optim.Optimizer) -> None:
        """Save an optimizer's state before its first step."""
        held = next((held for other, held in self._held if other is optimizer), {})
        if any(p not in optimizer.state for p in held) or any(
            content is not None and optimizer.state[p] is not e or content and not e for p, (e, content) in held.items()
        ):
            self.counts = self.counts or "it drops the state of its optimizer"
        self._save(entries_of(optimizer.state))
        self._before.append((optimizer, _keys_of(optimizer.state)))

    def _save(self, entries: Iterable[tuple[dict[Any, Any], Any, Any]]) -> None:
        self._entries += [entry for entry in entries if isinstance(entry[2], (torch.Tensor, *PLAIN))]

    def save_others(self, snapshot: Snapshot) -> None:
        """As `save`, after the trace, for optimizers that have not stepped, but whose methods may have been called."""
        for optimizer in snapshot.optimizers:
            if any(seen is optimizer for seen in self._seen):
                continue
            before = snapshot.optimizer_states[id(optimizer)]
            for p, held in before.items():
                table = optimizer.state.get(p) if isinstance(held, dict) else optimizer.state
                if isinstance(table, dict):
                    values = held.items() if isinstance(held, dict) else [(p, held)]
                    self._save((table, key, value) for key, value in values)
            self._before.append((optimizer, _keys_of(before)))

    def traced(
        self, effects: Effects, reconstructor: Reconstructor, move: Callable[[list[tuple[Any, Any]]], bool]
    ) -> None:
        """Record state that `step()` has bound to other tensors: each call binds a new one, which the next call reads.

        Args:
            move: tells the step which tensor has replaced another.
        """
        for entries, key, old in self._entries:
            new = entries.get(key)
            if isinstance(old, PLAIN):
                before = plain(old)
                if is_input_number(new) or new is not old and not same(before, new):
                    undo = functools.partial(operator.setitem, entries, key, before)
                    effects.add(undo, functools.partial(self._bind, entries, key, reconstructor.make(new), move))
                if not is_input_number(new) and new is not old and not same(before, new):
                    if is_plain_number(before):
                        description = f"state[...][{key!r}] of an optimizer"
                        self.numbers.append((Place(entries, key, description, key), before))
                    else:
                        self.counts = self.counts or f"its optimizer changes state[{key!r}]"
            elif new is not old and isinstance(new, torch.Tensor):
                effects.add(
                    functools.partial(operator.setitem, entries, key, old),
                    functools.partial(self._bind, entries, key, reconstructor.make(new), move),
                )

        for optimizer, old_entries in self._before:
            for p, entries in list(optimizer.state.items()):
                if not isinstance(entries, dict):
                    if p not in old_entries:
                        undo = functools.partial(optimizer.state.pop, p, None)
                        make = reconstructor.make(entries)
                        effects.add(undo, setting(functools.partial(operator.setitem, optimizer.state, p), make))
                    continue
                for key in [key for key in entries if key not in old_entries.get(p, ())]:
                    undo = functools.partial(_forget_entry, optimizer, p, key, p in old_entries)
                    effects.add(
                        undo, functools.partial(_new_entry, optimizer, p, key, reconstructor.make(entries[key]))
                    )

    def _bind(self, entries: dict[str, Any], key: str, make: Make, move: Any, env: CallFrame) -> Bind:
        new = make(env)

        def bind() -> None:
            old = entries[key]
            entries[key] = new
            if old is new:
                return
            if not isinstance(new, torch.Tensor):
                follows = True
            else:
                follows = old.shape == new.shape and old.dtype == new.dtype and move([(old, new)])
            for state in self._states if follows else ():
                state.follow(entries, key, new)

        return bind

    def end_trace(self) -> None:
        """Note at the end of the trace that the current state is what the step works on."""
        self._states = [StateOf(optimizer) for optimizer in self._seen]

    def replaced(self) -> bool:
        """Whether user code has replaced tensors in the state."""
        return any(state.replaced() for state in self._states)

    def undo(self) -> None:
        """Restore the state after a trace that is not used."""
        for optimizer, held in self._held:
            optimizer.state.clear()
            for p, (entries, content) in held.items():
                if content is not None:
                    entries.clear()
                    entries.update(content)
                optimizer.state[p] = entries


class StateOf:
    """The objects in an optimizer's state, to detect whether they are replaced."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        state = optimizer.state
        self._weights = list(state)
        self._entries = list(state.values())
        held = list(entries_of(state))
        self._tables = [table for table, _, _ in held]
        self._keys = [key for _, key, _ in held]
        self._values = [value for _, _, value in held]
        tables_and_keys = zip(self._tables, self._keys, strict=True)
        self._indices = {(id(table), key): i for i, (table, key) in enumerate(tables_and_keys)}

    def follow(self, entries: dict[str, Any], key: str, new: Any) -> None:
        """Note that the step itself has bound an entry to another object."""
        index = self._indices.get((id(entries), key))
        if index is not None:
            self._values[index] = new

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


def _forget_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, had_entries: bool) -> None:
    optimizer.state.get(p, {}).pop(key, None)
    if not had_entries and not optimizer.state.get(p, True):
        del optimizer.state[p]


def _new_entry(optimizer: torch.optim.Optimizer, p: torch.Tensor, key: str, make: Make, env: CallFrame) -> Bind:
    new = make(env)

    def bind() -> None:
        optimizer.state.setdefault(p, {})[key] = new

    return bind
