"""Control flow: the regions that `capture/control_flow.py` recorded, as StableHLO's case and while, and JAX's scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from ..program import operations
from ..program.operations import FLOWS, Flow, Region
from .dtypes import cast, to_jax
from .registry import OF_PROGRAMS, rule

# Computes a region of its operands, with a random key.
Run = Callable[[Region, Sequence[Any], Any], tuple[Any, ...]]


@rule(operations.region, operations.region_that_draws)
def region(operands, number, rng_key=None, *, lower):
    """The operands are shared, and after them come what each region lifted."""
    flow = FLOWS[number]
    lifted: list[Any] = []
    end = len(operands)
    for one in reversed(flow.regions):
        lifted.insert(0, operands[end - len(one.lifted) : end])
        end -= len(one.lifted)

    def run(region: Region, operands: Sequence[Any], key: Any) -> tuple[Any, ...]:
        found = lower(region.program, dict(zip(region.inputs, operands, strict=True)), key)
        return tuple(cast(x, to_jax(dtype)) for x, (_, dtype) in zip(found.values(), region.outputs, strict=True))

    return {"cond": _cond, "while": _while, "scan": _scan}[flow.kind](run, flow, operands[:end], lifted, rng_key)


OF_PROGRAMS.update((operations.region, operations.region_that_draws))


def _cond(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    pred, *operands = shared
    true, false = flow.regions

    def branch(one: Region, more: Sequence[Any]) -> Any:
        return lambda operands: run(one, [*operands, *more], key)

    return lax.cond(pred != 0, branch(true, lifted[0]), branch(false, lifted[1]), operands)


def _while(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    condition, body = flow.regions

    def is_going_on(state: Any) -> Any:
        (found,) = run(condition, [*state[1:], *lifted[0]], _round(key, state[0]))
        return jnp.reshape(found, ()) != 0

    def once(state: Any) -> Any:
        return state[0] + 1, *run(body, [*state[1:], *lifted[1]], _round(key, state[0]))

    return lax.while_loop(is_going_on, once, (jnp.int32(0), *shared))[1:]


def _scan(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    (body,) = flow.regions
    init, xs = shared[: flow.carried], shared[flow.carried :]

    def once(carried: Any, along: Any) -> Any:
        number, *slices = along
        out = run(body, [*carried, *slices, *lifted[0]], _round(key, number))
        return out[: flow.carried], out[flow.carried :]

    numbers = jnp.arange(xs[0].shape[0], dtype=jnp.int32)
    carried, ys = lax.scan(once, tuple(init), (numbers, *xs), reverse=flow.reverse)
    return *carried, *ys


def _round(key: Any, number: Any) -> Any:
    """The key of one round of a loop: a backward walk draws in each what the forward walk did."""
    return None if key is None else jax.random.fold_in(key, number)


@rule(operations.barrier)
def barrier(xs, after):
    """What comes behind is not merged with what came before: see `capture/activation_checkpointing.py`.

    XLA takes barriers out before it merges equal computations on a CPU. There each operand is chosen by a condition
    that holds whatever `after` is, which XLA cannot see, and LLVM can: it leaves nothing of it in the code.
    """
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier((*xs, after))[:-1]
    holds = (_some_bits(after if after.size else xs[0]) & 1) < 2
    return [x if not x.size else lax.select(jnp.broadcast_to(holds, x.shape), x, lax.full_like(x, 0)) for x in xs]


def _some_bits(x):
    """An integer made of the first element."""
    first = lax.squeeze(lax.slice(lax.reshape(x, (x.size,)), [0], [1]), [0])
    first = lax.real(first) if first.dtype.kind == "c" else first
    if first.dtype.kind in "biu":
        return lax.convert_element_type(first, jnp.int32)
    return lax.bitcast_convert_type(first, {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[first.dtype.itemsize])
