"""`firstloss.trace`: a training step, traced and compiled once, then executed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as pytree

from .. import timeline
from ..capture.deferred import named_tensors
from ..capture.program import Program, Ref, Value
from ..capture.recorder import DeferredTensor, Store
from ..capture.step import StepTrace, is_traced
from ..errors import LoweringError, TraceError
from ..lower import program as lowering
from ..lower.dtypes import to_jax
from .backend import Backend, current_backend
from .cell import Cell
from .jaxlib import lend, to_host, x64
from .optimizers import Optimizers


def trace(step: Callable[..., Any]) -> Callable[..., Any]:
    """Make `step` a traced step: traced and compiled at its first call, executed at every call.

    Everything that the step does to tensors, forward, backward and optimizer, becomes one executable; weights and
    optimizer state stay on the device and are updated in place. Calls return as soon as the work is under way; a
    returned tensor's value is waited for when it is read. On the "CPU" and "GPU" backends the step just runs.
    """
    return TracedStep(step)


class TracedStep:
    """A step and its executables, one for each kind of batch it has met."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._executables: dict[Any, Executable] = {}
        functools.update_wrapper(self, step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        backend = current_backend()
        if not backend.is_xla:
            return self._step(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        key = (id(backend), spec, tuple(_kind(leaf) for leaf in leaves), _grads(backend))
        executable = self._executables.get(key)
        if executable is None or executable.outdated():
            executable = self._executables[key] = Executable(self._step, leaves, spec, backend)
        return executable(leaves)

    def program(self) -> Program:
        """The Program traced last."""
        if not self._executables:
            raise TraceError(f"{self._step.__name__} has not been called yet, so there is no Program.")
        return list(self._executables.values())[-1].program


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    try:
        hash(leaf)
    except TypeError:
        raise TraceError(
            f"a traced step was given an argument of type {type(leaf).__name__}. Pass tensors, in tuples, lists and "
            "dicts, or constants."
        ) from None
    return (type(leaf), leaf)


def _grads(backend: Backend) -> tuple:
    """Which parameters hold a gradient already: a step adds to it, or starts anew."""
    with_grad = tuple(i for i, p in enumerate(backend.parameters()) if p.grad is not None)
    return with_grad


class Executable:
    """One traced, lowered and compiled step."""

    def __init__(self, step: Callable[..., Any], leaves: list[Any], spec: Any, backend: Backend) -> None:
        self._first = True
        with timeline.span("trace"):
            self._trace(step, leaves, spec, backend)
        self._lower_and_compile(step)

    # -- trace --

    def _trace(self, step: Callable[..., Any], leaves: list[Any], spec: Any, backend: Backend) -> None:
        tracing = StepTrace()
        self._optimizers = Optimizers(tracing)
        self._batch: dict[Value, int] = {}
        batch_values: dict[Value, DeferredTensor] = {}
        grads_before = {id(p): p.grad for p in backend.parameters()}
        traced = list(leaves)
        try:
            with tracing.active(), self._optimizers.watched():
                for i, leaf in enumerate(leaves):
                    if isinstance(leaf, torch.Tensor):
                        made = tracing.new_input(leaf, f"batch{i}")
                        traced[i] = made.requires_grad_(True) if leaf.requires_grad else made
                        self._batch[made._store.value] = i
                        batch_values[made._store.value] = made
                args, kwargs = pytree.tree_unflatten(traced, spec)
                result = step(*args, **kwargs)
        except BaseException:
            self._undo(tracing, backend, grads_before)
            raise
        backend.claim(self._optimizers.new_state)
        results, self._result_spec = pytree.tree_flatten(result)
        outputs: dict[str, Ref] = {}
        self._results: list[Any] = []
        for i, leaf in enumerate(results):
            if type(leaf) is DeferredTensor:
                outputs[f"out{i}"] = leaf._ref()
                self._results.append(f"out{i}")
            else:
                self._results.append(_Constant(leaf))
        # State: what existed before and has changed, and what is new and can still be reached from outside.
        self._changed: dict[Value, Any] = {}
        for value, made in batch_values.items():
            node = made._store.value.node
            if node is not None:
                self._undo(tracing, backend, grads_before)
                raise TraceError(
                    f"{node.source}: the step edits its argument in place, and the caller's tensor would not see it. "
                    "Edit a clone of it, or return it."
                )
        for value, new in tracing.changes.items():
            outputs[f"new{len(self._changed)}"] = Ref(new, new.shape, new.stride, 0, new.dtype)
            self._changed[value] = tracing.inputs[value]
        self._made: list[Store] = []
        for tensor in _reachable(backend, self._optimizers.seen):
            if is_traced(tensor, tracing) and not any(s is tensor._store for s in self._made):
                new = tensor._store.value
                outputs[f"made{len(self._made)}"] = Ref(new, new.shape, new.stride, 0, new.dtype)
                self._made.append(tensor._store)
        self.program = Program({value.label or "in": value for value in tracing.inputs}, outputs)
        needed = {ref.value for node in self.program.nodes for ref in node.refs()}
        needed |= {value for node in self.program.nodes for ref in node.writes for value in (ref.value,)}
        needed |= {ref.value for ref in outputs.values()}
        self._inputs = {v: s for v, s in tracing.inputs.items() if v in needed or v in self._changed}
        self._backend = backend
        self._constants = self._optimizers.constants()
        self._draws = tracing.draws

    def _undo(self, tracing: StepTrace, backend: Backend, grads_before: dict[int, Any]) -> None:
        """A step that could not be traced leaves nothing behind."""
        for p in backend.parameters():
            p.grad = grads_before.get(id(p))
        new = self._optimizers.new_state
        for optimizer in self._optimizers.seen:
            for entries in optimizer.state.values():
                for key in [k for k, v in entries.items() if any(v is n for n in new)]:
                    del entries[key]

    def outdated(self) -> bool:
        """Whether a number that is baked into the executable has been changed since."""
        return self._optimizers.constants() != self._constants

    # -- lower, compile --

    def _lower_and_compile(self, step: Callable[..., Any]) -> None:
        missing = lowering.unsupported(self.program)
        if missing:
            lines = [f"{op} (first at {nodes[0].source})" for op, nodes in missing.items()]
            raise LoweringError(
                "the step uses operations that have no lowering to StableHLO: "
                + "; ".join(lines)
                + ". Write those lines with other operations, or run on backend 'CPU'."
            )
        changed = list(self._changed)
        others = [v for v in self._inputs if v not in self._changed]
        made = len(self._made)
        program, draws, names = self.program, self._draws, [r for r in self._results if isinstance(r, str)]

        def run(state: tuple, rest: tuple, seed: Any) -> tuple:
            values = {**dict(zip(changed, state, strict=True)), **dict(zip(others, rest, strict=True))}
            key = jax.random.fold_in(jax.random.key(seed[0]), seed[1]) if draws else None
            outputs = lowering.lower(program, values, key)
            return (
                tuple(outputs[f"new{i}"] for i in range(len(changed))),
                tuple(outputs[f"made{i}"] for i in range(made)),
                tuple(outputs[name] for name in names),
            )

        run.__name__ = getattr(step, "__name__", "step")

        def shape(value: Value) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(value.shape, to_jax(value.dtype))

        with x64():
            with timeline.span("lower"):
                lowered = jax.jit(run, donate_argnums=(0,)).lower(
                    tuple(shape(v) for v in changed),
                    tuple(shape(v) for v in others),
                    jax.ShapeDtypeStruct((2,), np.uint32),
                )
            with timeline.span("compile"):
                self._compiled = lowered.compile()
        self._order = changed, others
        self._steps = 0
        self._seed = torch.initial_seed() & 0xFFFFFFFF

    # -- run --

    def __call__(self, leaves: list[Any]) -> Any:
        changed, others = self._order
        with x64():
            state = tuple(self._array(v, leaves) for v in changed)
            rest = tuple(self._array(v, leaves) for v in others)
            seed = np.array([self._seed, self._steps], np.uint32)
            begin = timeline.current().now()
            new, made, results = self._compiled(state, rest, seed)
            if self._first:
                self._first = False
                jax.block_until_ready(results)
                timeline.current().add("first step", begin)
                timeline.current().mark(timeline.FIRST_LOSS)
        self._steps += 1
        for value, array in zip(changed, new, strict=True):
            home = self._changed[value]
            if isinstance(home, Store):
                home.resident.set(array)
            else:  # a real tensor from outside the backend
                with torch.no_grad():
                    home.copy_(to_host(array))
        for store, array in zip(self._made, made, strict=True):
            if store.resident is None:
                store.resident = Cell(store.value)
                store.trace = None
            store.resident.set(array)
        arrays = iter(results)
        out = [_resident(next(arrays)) if isinstance(r, str) else r.value for r in self._results]
        return pytree.tree_unflatten(out, self._result_spec)

    def _array(self, value: Value, leaves: list[Any]) -> Any:
        i = self._batch.get(value)
        if i is not None:
            leaf = leaves[i]
            if type(leaf) is DeferredTensor and leaf._store.resident is not None:
                return leaf._store.resident.array() if leaf._ref().whole else lend(leaf.clone())
            return lend(leaf.detach().clone(memory_format=torch.contiguous_format))
        number = self._optimizers.hyperparameters.get(value)
        if number is not None:
            return np.float64(number.read())
        home = self._inputs[value]
        if isinstance(home, Store):
            if home.resident is None:
                self._backend.claim(home.alive())
            return home.resident.array()
        return lend(home.detach().clone(memory_format=torch.contiguous_format))


class _Constant:
    def __init__(self, value: Any) -> None:
        self.value = value


def _resident(array: jax.Array) -> DeferredTensor:
    """A tensor of the backend that holds `array`."""
    from ..lower.dtypes import to_torch

    shape = tuple(array.shape)
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    value = Value(shape, tuple(reversed(stride)), to_torch(array.dtype), torch.device("cpu"))
    store = Store(value)
    store.resident = Cell(value, array=array)
    return DeferredTensor.wrap(store, shape, value.stride, 0, value.dtype)


def _reachable(backend: Backend, optimizers: list[torch.optim.Optimizer]) -> Any:
    """The tensors that outlive a step: gradients, buffers and attributes of the models, the optimizers' state."""
    for model in backend.models:
        for _, tensor, kind in named_tensors(model):
            yield tensor
            if kind == "parameter" and tensor.grad is not None:
                yield tensor.grad
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            yield from (v for v in entries.values() if isinstance(v, torch.Tensor))
