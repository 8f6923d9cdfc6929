"""cbfloat16 in place of float16: 1 sign, 6 exponent and 9 mantissa bits, emulated.

XLA has no such type. A Program is rewritten so that float16 values are held in float32, and rounded to cbfloat16 after
every operation that produces them: the same as computing in float32 and rounding once, as for all half precisions here.
The format is Cerebras' CB16 (docs.cerebras.net, "Data Formats"). Exponents are biased as in IEEE 754, so the largest
number is about 4.3e9 and the smallest 9.3e-10; larger ones become infinite, and smaller ones zero.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from jax import lax

from ..errors import LoweringError
from ..program.graph import Node, Ref, Value
from ..program.nested import mapped
from ..program.program import Program
from ..program.source import UNKNOWN, Source
from .registry import rule

EXPONENT_BITS, MANTISSA_BITS = 6, 9

_library = torch.library.Library("firstloss", "FRAGMENT")
_library.define("round_cbfloat16(Tensor self) -> Tensor")
_ROUND = torch.ops.firstloss.round_cbfloat16.default


@rule(_ROUND)
def round_cbfloat16(self):
    return lax.reduce_precision(self, EXPONENT_BITS, MANTISSA_BITS)


def refuse_state(value: Value) -> None:
    """Reject state in cbfloat16, which cannot be kept from step to step.

    Raises:
        LoweringError: if `value` is float16.
    """
    if value.dtype == torch.float16:
        raise LoweringError(
            f"{value.node.source if value.node is not None else 'the step'}: a float16 tensor that outlives the step "
            "is changed in a step with cbfloat16, which exists only within a step. Keep weights and state in float32."
        )


def in_place_of_float16(program: Program) -> Program:
    """Rewrite `program` with cbfloat16 in place of float16. Its inputs are unchanged; float16 outputs become float32.

    Raises:
        LoweringError: if the bits of a float16 tensor are viewed.
    """
    return _Rewriting(program).program


class _Rewriting:
    def __init__(self, program: Program) -> None:
        self._index = itertools.count()
        self._new: dict[Value, Value] = {}
        for value in program.inputs.values():
            if value.dtype == torch.float16:
                wide = self._converted(value, torch.ops.aten._to_copy.default, UNKNOWN, dtype=torch.float32)
                self._new[value] = wide
            else:
                self._new[value] = value
        for node in program.nodes:
            self._rewrite(node)
        self.program = Program(
            program.inputs, {name: self._ref(ref) for name, ref in program.outputs.items()}, program.notes
        )

    def _rewrite(self, node: Node) -> None:
        refs = {id(ref): self._ref(ref) for ref in (*node.refs(), *node.writes)}  # a mutated argument is the same Ref

        def rewritten(arg: Any) -> Any:
            if type(arg) is Ref:
                return refs[id(arg)]
            return torch.float32 if arg is torch.float16 else arg

        args, kwargs = mapped(rewritten, node.args), {key: mapped(rewritten, arg) for key, arg in node.kwargs.items()}
        writes = tuple(refs[id(ref)] for ref in node.writes)
        new_node = Node(next(self._index), node.op, args, kwargs, writes, node.overwrites, node.draw, node.source)
        new_node.outputs = tuple(Value(v.shape, v.stride, _wide(v.dtype), v.device, new_node) for v in node.outputs)
        for old, new in zip(node.outputs, new_node.outputs, strict=True):
            self._new[old] = self._converted(new, _ROUND, node.source) if old.dtype == torch.float16 else new

    def _converted(self, value: Value, op: Any, source: Source, **kwargs: Any) -> Value:
        """The result of `op` on all of `value`, in float32."""
        ref = Ref.of(value)
        node = Node(next(self._index), op, (ref,), kwargs, (), False, None, source)
        result = Value(value.shape, value.stride, torch.float32, value.device, node)
        node.outputs = (result,)
        return result

    def _ref(self, ref: Ref) -> Ref:
        if (ref.dtype == torch.float16) != (ref.value.dtype == torch.float16):
            source = ref.value.node.source if ref.value.node is not None else UNKNOWN
            raise LoweringError(
                f"{source}: a float16 tensor is viewed as another dtype, or another dtype as float16, but emulated "
                "cbfloat16 has no bits. Use view(dtype) outside of the step, or another half precision."
            )
        return ref._replace(value=self._value(ref.value), dtype=_wide(ref.dtype))

    def _value(self, value: Value) -> Value:
        if value not in self._new:  # a constant or uninitialized memory
            wide = value
            if value.dtype == torch.float16:
                wide = Value(value.shape, value.stride, torch.float32, value.device)
                wide.real = None if value.real is None else value.real.float()
            self._new[value] = wide
        return self._new[value]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype
