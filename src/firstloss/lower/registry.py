"""The table of lowering rules: one short function an ATen overload.

A rule takes what the ATen operation takes, in the schema's order and under the schema's keyword names, with every
tensor replaced by a JAX array and every `torch.dtype` left as it is; it returns a JAX array, or a tuple of them where
the operation returns several tensors.

PyTorch's result dtypes are known from capture, so a rule does not work them out: the driver (`program.py`) casts
each result to the dtype that capture recorded, and checks its shape. What a rule does own is the dtype that the
arithmetic is done in; `promoted` in `dtypes.py` gives the one PyTorch uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..compat.torch_names import OpOverload, OpOverloadPacket, inner_overload

RULES: dict[OpOverload, Callable] = {}


def rule(*overloads: OpOverload | str) -> Callable[[Callable], Callable]:
    """Enter the decorated function as the lowering of `overloads`; an overload is entered once.

    One that not every version of PyTorch has is given by name, "cholesky.default", and left out where it is missing.
    """

    def enter(function: Callable) -> Callable:
        for overload in filter(None, map(_present, overloads)):
            if overload in RULES:
                raise ValueError(f"{overload} already has a lowering: {RULES[overload].__qualname__}")
            RULES[overload] = function
        return function

    return enter


def _present(overload: OpOverload | str) -> OpOverload | None:
    if isinstance(overload, OpOverload):
        return overload
    name, _, variant = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), variant, None)


def register_lowering(op: Any, *, replace: bool = False) -> Callable[[Callable], Callable]:
    """Tell Firstloss how to lower an operation of your own, one made with `torch.library`.

    To be used as a decorator on a function that takes what the operation takes, each tensor as a JAX array, and returns
    what it returns: an array for a tensor, a tuple for several. Of an operation that writes to its arguments it
    returns, after those, the new content of each argument written to. Results are cast to the dtypes that the
    operation's fake kernel gave; another shape than it gave is an error. The function is traced by JAX, so it computes
    with `jax.numpy` and `jax.lax`. Of an operation that is tagged `torch.Tag.nondeterministic_seeded` it takes
    `rng_key`, too, a key for `jax.random` that is another at every step.

        @firstloss.register_lowering(torch.ops.mine.scaled_tanh)
        def scaled_tanh(x, scale):
            return scale * jnp.tanh(x)

    For a backward pass, give the operation an autograd formula (`torch.library.register_autograd`) as eager PyTorch
    needs one too: it is captured like any other code, and the operations of yours that it calls want a lowering each.

    Args:
        op: `torch.ops.namespace.name`, one overload of it, or what `torch.library.custom_op` returned.
        replace: take the place of a lowering that there is already.

    Raises:
        TypeError: if `op` is no operation.
        ValueError: if it has a lowering already and `replace` is False.
    """
    from .program import forget_functions  # which brings JAX, and all the rules that there are

    overloads = _overloads(op)

    def enter(function: Callable) -> Callable:
        for overload in overloads:
            if overload in RULES and not replace:
                raise ValueError(f"{overload} has a lowering already; replace=True takes its place")
        RULES.update(dict.fromkeys(overloads, function))
        forget_functions()
        return function

    return enter


def _overloads(op: Any) -> list[OpOverload]:
    op = inner_overload(op)  # what torch.library.custom_op returns
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, OpOverloadPacket):
        return [getattr(op, name) for name in op.overloads()]
    raise TypeError(
        f"register_lowering needs an operation such as torch.ops.mine.scaled_tanh, not a {type(op).__name__}. A Python "
        "function of torch operations needs no lowering; a kernel from elsewhere becomes an operation by "
        "torch.library.custom_op."
    )
