"""Jaxprs of a Program's calls, and an interpreter of jaxprs with arbitrary abstract values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jex
from jax.sharding import Sharding

from .dtypes import is_kept, to_jax
from .program import LoweredCall

T = TypeVar("T")


def jaxpr_of(call: LoweredCall, sharding: Sharding | None = None) -> jex.Jaxpr:
    """The jaxpr of a call, whose inputs are its operands and, if it draws, a random key.

    Args:
        sharding: the mesh on which it will be lowered, as a sharding on it: JAX then traces the call only once.
    """
    arrays = [jax.ShapeDtypeStruct(tuple(value.shape), to_jax(value.dtype), sharding=sharding) for value in call.inputs]
    if call.draw is not None:
        arrays.append(jax.ShapeDtypeStruct(_key().shape, _key().dtype, sharding=sharding))
    with jax.enable_x64(True):
        return call.jaxpr(arrays)


@functools.cache
def _key() -> jax.ShapeDtypeStruct:
    """The shape and dtype of a random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


def interpret(
    jaxpr: jex.Jaxpr,
    inputs: Sequence[T],
    constant: Callable[[Any], T],
    apply: Callable[[Any, list[T]], Sequence[T]],
) -> list[T]:
    """Interpret a jaxpr on abstract inputs and return the abstract outputs. Called jaxprs are interpreted as well.

    Args:
        constant: makes the abstract value of a constant, given its aval.
        apply: makes the abstract results of an equation, given the equation and its abstract operands.
    """
    env: dict[Any, T] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> T:
        if isinstance(atom, jex.Literal):
            return constant(atom.aval)
        if atom not in env:
            env[atom] = constant(atom.aval)
        return env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        called = called_by(eqn)
        inner = called and called.jaxpr
        results: Sequence[T]
        if is_kept(eqn):
            results = operands[:1]
        elif inner is not None and len(inner.invars) == len(operands):
            results = interpret(inner, operands, constant, apply)
        else:
            results = apply(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def called_by(eqn: Any) -> jex.ClosedJaxpr | None:
    """The jaxpr that an equation calls once with its own operands, if any."""
    if eqn.primitive.name in ("while", "scan", "cond"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = eqn.params.get(name)
        if called is not None:
            return called if isinstance(called, jex.ClosedJaxpr) else jex.ClosedJaxpr(called, ())
    return None
