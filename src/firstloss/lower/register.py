"""Lowerings of a user's own operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.torch_names import OpOverload, OpOverloadPacket, inner_overload
from .program import forget_functions
from .registry import OF_USERS
from .rules import RULES


def register_lowering(op: Any, *, replace: bool = False) -> Callable[[Callable], Callable]:
    """Tell Firstloss how to lower an operation of your own, one made with `torch.library`.

    To be used as a decorator on a function that takes what the operation takes, each tensor as a JAX array, and returns
    what it returns: an array for a tensor, a tuple for several. Of an operation that writes to its arguments it
    returns, after those, the new content of each argument written to. Results are cast to the dtypes that the
    operation's fake kernel gave; another shape than it gave is an error. The function is traced by JAX, so it computes
    with `jax.numpy` and `jax.lax`. Of an operation that is tagged `torch.Tag.nondeterministic_seeded` it takes
    `rng_key`, too, a key for `jax.random` that is another at every step.

    For a backward pass, give the operation an autograd formula (`torch.library.register_autograd`) as eager PyTorch
    needs one too: it is captured like any other code, and the operations of yours that it calls want a lowering each.

    Examples:
        >>> import jax.numpy as jnp
        >>> @torch.library.custom_op("mine::scaled_tanh", mutates_args=())
        ... def scaled_tanh(x: torch.Tensor, scale: float) -> torch.Tensor:
        ...     return scale * x.tanh()
        >>> @scaled_tanh.register_fake
        ... def _(x, scale):
        ...     return torch.empty_like(x)
        >>> @fl.register_lowering(torch.ops.mine.scaled_tanh)
        ... def _(x, scale):
        ...     return scale * jnp.tanh(x)
        >>> backend = fl.backend("XLA")
        >>> @fl.trace
        ... def step(x):
        ...     return torch.ops.mine.scaled_tanh(x, 2.0)
        >>> step(torch.zeros(2)).tolist()
        [0.0, 0.0]

    Args:
        op: `torch.ops.namespace.name`, one overload of it, or what `torch.library.custom_op` returned.
        replace: take the place of a lowering that there is already.

    Returns:
        The decorator, which returns the function that it is given.

    Raises:
        TypeError: if `op` is no operation.
        ValueError: if it has a lowering already and `replace` is False.
    """
    overloads = _overloads(op)

    def enter(function: Callable) -> Callable:
        for overload in overloads:
            if overload in RULES and not replace:
                raise ValueError(f"{overload} has a lowering already; replace=True takes its place")
        RULES.update(dict.fromkeys(overloads, function))
        OF_USERS.update(overloads)
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
