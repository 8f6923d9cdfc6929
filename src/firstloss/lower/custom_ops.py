"""Lowerings of users' custom operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..compat.torch_names import OpOverload, OpOverloadPacket, inner_overload
from .program import forget_functions
from .registry import OF_USERS
from .rules import RULES

F = TypeVar("F", bound=Callable[..., Any])


def register_lowering(op: Any, *, replace: bool = False) -> Callable[[F], F]:
    """Register a lowering for a custom operation made with `torch.library`.

    Use it as a decorator of a function with the operation's arguments, tensors as JAX arrays, that returns its results:
    an array for a tensor, a tuple for several. For an operation that mutates arguments it also returns, after those,
    the new content of each mutated argument. Results are cast to the dtypes of the operation's fake kernel; shapes must
    match its shapes. The function is traced by JAX, so it computes with `jax.numpy` and `jax.lax`. If the operation is
    tagged `torch.Tag.nondeterministic_seeded`, the function also takes `rng_key`, a key for `jax.random` that differs
    at every step.

    For the backward pass, register an autograd formula (`torch.library.register_autograd`), as for eager PyTorch: it is
    captured like any other code, and custom operations that it calls need a lowering as well.

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
        op: `torch.ops.namespace.name`, one of its overloads, or what `torch.library.custom_op` returned.
        replace: whether to replace an existing lowering.

    Returns:
        The decorator, which returns the decorated function.

    Raises:
        TypeError: if `op` is not an operation.
        ValueError: if it has a lowering already and `replace` is False.
    """
    overloads = _overloads(op)

    def enter(function: F) -> F:
        for overload in overloads:
            if overload in RULES and not replace:
                raise ValueError(f"{overload} already has a lowering; pass replace=True to replace it")
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
