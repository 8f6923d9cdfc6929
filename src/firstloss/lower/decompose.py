"""Lowering of operations without a rule, by PyTorch's decompositions.

There are three sources: an operation's composite kernel ("CompositeImplicitAutograd"); the table filled by
`torch._decomp.register_decomposition`; and, for operations that torch itself defines with `custom_op` (chunked cross
entropy), their Python implementation, which for users' operations could be anything. The decomposition's Python code is
captured like a step, and lowered in the operation's place; equal nodes share their lowering, as always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..capture.recorder import DeferredTensor
from ..capture.step import StepTrace
from ..compat.torch_names import OpOverload, can_decompose, python_of, pytree, schema_of
from ..errors import FirstlossError, LoweringError
from ..program.graph import Ref, Value
from ..program.program import Program
from .dtypes import to_torch

# Operations defined by libraries that read values to be fast on one device; these have rules.
OF_LIBRARIES: dict[str, Callable[..., Any]] = {}

_in_progress: list[OpOverload] = []


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """A function that computes `op` by other operations, or None."""
    if schema_of(op).name in OF_LIBRARIES:
        return OF_LIBRARIES[schema_of(op).name]
    if can_decompose(op)():
        return op.decompose
    if op.namespace == "torch_nn":
        from ..compat.torch_names import OPDEFS

        return python_of(OPDEFS[schema_of(op).name])
    from ..compat.torch_names import decomposition_table  # here, because it is slow to import and seldom needed

    return decomposition_table.get(op)


def rule_of(op: OpOverload, lower: Callable[..., dict[str, Any]]) -> Callable[..., Any] | None:
    """A rule for `op` from its decomposition; None if it has none. `lower` lowers a Program."""
    if schema_of(op).name in OF_LIBRARIES:
        return OF_LIBRARIES[schema_of(op).name]
    function = decomposition(op)
    if function is None:
        return None

    def rule(*args: Any, rng_key: Any = None, **kwargs: Any) -> list[Any]:
        if op in _in_progress:
            raise LoweringError(f"the decomposition of {op} calls {op} again")
        _in_progress.append(op)
        try:
            program, arrays = _capture(op, function, args, kwargs)
            return list(lower(program, arrays, rng_key).values())
        except LoweringError as error:
            raise LoweringError(f"{error} (in the decomposition of {op})") from error
        finally:
            _in_progress.pop()

    return rule


def _capture(
    op: OpOverload, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[Any, Any]
) -> tuple[Program, dict[Value, Any]]:
    """Capture the decomposition as a Program, with its inputs' arrays; outputs: new tensors, then mutated ones."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    arrays: dict[Value, Any] = {}
    outputs: dict[str, Ref] = {}
    tracing = StepTrace()
    active = tracing.active()
    with active, active, torch.no_grad():
        leaves = []
        for leaf in flat:
            if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
                like = torch.empty(leaf.shape, dtype=to_torch(leaf.dtype), device="meta")
                deferred = tracing.new_input(like, f"in{len(arrays)}")
                arrays[deferred._storage.value] = leaf
                leaf = deferred
            leaves.append(leaf)
        args, kwargs = spec.unflatten(leaves)
        try:
            result = function(*args, **kwargs)
        except FirstlossError:
            raise
        except Exception as error:  # decompositions raise various errors for unsupported arguments
            raise LoweringError(
                f"{op} has no lowering to StableHLO, and PyTorch's decomposition of it fails ({error}). Write the line "
                f"with other operations, or register one: firstloss.register_lowering(torch.ops.{op})."
            ) from error
        written = _written(op, args, kwargs)
        fresh = [
            x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and not any(x is w for w in written)
        ]
        for i, x in enumerate([*fresh, *written]):
            x = x if type(x) is DeferredTensor else torch.ops.aten.clone(x)
            outputs[f"out{i}"] = x._ref()
    if tracing.draws and torch.Tag.nondeterministic_seeded not in op.tags:
        raise LoweringError(f"the decomposition of {op} draws random numbers, but has no key for them")
    for value, base in tracing.inputs.items():
        if value not in arrays:  # a real tensor in the decomposition is a constant
            assert isinstance(base, torch.Tensor)
            value.real = base.detach().clone()
    return Program({v.label or "in": v for v in arrays}, outputs), arrays


def _written(op: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> list[torch.Tensor]:
    out: list[torch.Tensor] = []
    for i, spec in enumerate(schema_of(op).arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            arg = kwargs.get(spec.name) if spec.kwarg_only or i >= len(args) else args[i]
            out.extend(x for x in pytree.tree_leaves(arg) if isinstance(x, torch.Tensor))
    return out
