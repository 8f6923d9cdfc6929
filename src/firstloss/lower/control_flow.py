"""Control flow: the regions recorded by `capture/control_flow.py`, lowered to StableHLO's case and while or scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp

from ..program import operations, regions
from ..program.regions import FLOWS, Flow, Region
from .dtypes import cast, to_jax
from .registry import OF_PROGRAMS, rule
from .threefry import fold_in

# A function that computes a region on its operands, with a random key.
Run = Callable[[Region, Sequence[Any], Any], tuple[Any, ...]]


@rule(regions.region, regions.region_that_draws)
def region(operands, number, rng_key=None, *, lower):
    """The operands are the shared ones, followed by those lifted for each region."""
    flow = FLOWS[number]
    lifted: list[Any] = []
    end = len(operands)
    for body in reversed(flow.regions):
        lifted.insert(0, operands[end - body.lifted : end])
        end -= body.lifted

    def run(region: Region, operands: Sequence[Any], key: Any) -> tuple[Any, ...]:
        outputs = lower(region.program, dict(zip(region.inputs, operands, strict=True)), key)
        return tuple(cast(x, to_jax(dtype)) for x, (_, dtype) in zip(outputs.values(), region.outputs, strict=True))

    return {"cond": _cond, "while": _while, "scan": _scan}[flow.kind](run, flow, operands[:end], lifted, rng_key)


OF_PROGRAMS.update((regions.region, regions.region_that_draws))


def _cond(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    pred, *operands = shared
    true, false = flow.regions

    def branch(body: Region, more: Sequence[Any]) -> Any:
        return lambda operands: run(body, [*operands, *more], key)

    return lax.cond(pred != 0, branch(true, lifted[0]), branch(false, lifted[1]), operands)


def _while(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    condition, body = flow.regions

    def is_going_on(state: Any) -> Any:
        (going_on,) = run(condition, [*state[1:], *lifted[0]], _round(key, state[0]))
        return jnp.reshape(going_on, ()) != 0

    def iteration(state: Any) -> Any:
        return state[0] + 1, *run(body, [*state[1:], *lifted[1]], _round(key, state[0]))

    return lax.while_loop(is_going_on, iteration, (jnp.int32(0), *shared))[1:]


def _scan(run: Run, flow: Flow, shared: Sequence[Any], lifted: Sequence[Sequence[Any]], key: Any) -> tuple[Any, ...]:
    (body,) = flow.regions
    init, xs = shared[: flow.carried], shared[flow.carried :]

    def iteration(carried: Any, along: Any) -> Any:
        number, *slices = along
        out = run(body, [*carried, *slices, *lifted[0]], _round(key, number))
        return out[: flow.carried], out[flow.carried :]

    numbers = jnp.arange(xs[0].shape[0], dtype=jnp.int32)
    carried, ys = lax.scan(iteration, tuple(init), (numbers, *xs), reverse=flow.reverse)
    return *carried, *ys


def _round(key: Any, number: Any) -> Any:
    """The key of one iteration of a loop; the backward loop draws the same numbers as the forward loop."""
    return None if key is None else fold_in(key, number)


@rule(operations.barrier)
def barrier(xs, after):
    """Keep computations on `xs` separate from those before `after`: see `capture/activation_checkpointing.py`.

    XLA on a CPU removes optimization barriers before it merges equal computations. So each operand is selected by a
    condition that is always true, which XLA cannot see but LLVM can, so that it costs nothing.
    """
    if jax.default_backend() != "cpu":
        return lax.optimization_barrier((*xs, after))[:-1]
    holds = (_some_bits(after if after.size else xs[0]) & 1) < 2
    return [x if not x.size else lax.select(jnp.broadcast_to(holds, x.shape), x, lax.full_like(x, 0)) for x in xs]


def _some_bits(x):
    """An integer computed from the first element."""
    first = lax.squeeze(lax.slice(lax.reshape(x, (x.size,)), [0], [1]), [0])
    first = lax.real(first) if first.dtype.kind == "c" else first
    if first.dtype.kind in "biu":
        return lax.convert_element_type(first, jnp.int32)
    return lax.bitcast_convert_type(first, {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}[first.dtype.itemsize])
