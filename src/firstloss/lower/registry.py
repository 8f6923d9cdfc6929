"""The table of lowering rules: a short function for each ATen overload.

A rule takes the ATen operation's arguments, in the schema's order and under its keyword names, with tensors replaced by
JAX arrays and every `torch.dtype` unchanged; it returns a JAX array, or a tuple of them if the operation returns
several tensors.

PyTorch's result dtypes are known from capture, so rules do not compute them: the driver (`program.py`) casts each
result to the dtype that capture recorded, and checks its shape. A rule chooses only the dtype of its arithmetic;
`promoted` in `dtypes.py` returns PyTorch's.

Capture records the operations that user code calls, including in-place ones; rules are registered only for the
functional overload (`functional`), which follows from the names that torchgen generates: `add_.Tensor` is `add.Tensor`.

The rules import JAX. `rules.txt` lists them for callers that must not (`is_certain`);
`python -m firstloss.lower.rules` rewrites it, and a test compares it with the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.ops import aten

from ..compat.torch_names import OpOverload, overload_name, schema_of
from ..program.graph import Node

# Exceptions to torchgen's naming pattern.
_IRREGULAR = {
    aten.normal_.default: aten.normal_functional.default,
    aten.normal.float_float_out: aten.normal.float_float,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.bernoulli_.Tensor: aten.bernoulli.Tensor,
    aten._native_batch_norm_legit.default: aten._native_batch_norm_legit_functional.default,
    aten._unsafe_view.default: aten.view.default,
    aten.pow_.Scalar: aten.pow.Tensor_Scalar,
    aten.pow_.Tensor: aten.pow.Tensor_Tensor,
    aten.polygamma_.default: aten.polygamma_.default,  # has its arguments in another order, and its own rule
    aten.floor_divide_.Tensor: aten.floor_divide.default,
    aten.__ilshift__.Scalar: aten.__lshift__.Scalar,
    aten.__ilshift__.Tensor: aten.__lshift__.Tensor,
    aten.__irshift__.Scalar: aten.__rshift__.Scalar,
    aten.__irshift__.Tensor: aten.__rshift__.Tensor,
}


@functools.cache
def functional(op: OpOverload) -> OpOverload:
    """The overload that returns what `op` returns or mutates, and mutates nothing; `op` itself if it is functional."""
    if op in _IRREGULAR:
        return _IRREGULAR[op]
    if not schema_of(op).is_mutable:
        return op
    namespace, name = schema_of(op).name.split("::")
    packets = getattr(torch.ops, namespace)
    for candidate in (name.removesuffix("_"), f"{name.removesuffix('_')}_functional"):
        packet = getattr(packets, candidate, None)
        if packet is None:
            continue
        overload_of_packet = getattr(packet, overload_name(op), None)
        if overload_of_packet is not None and not schema_of(overload_of_packet).is_mutable:
            return overload_of_packet
    # `add.out(self, other, out)`: the overload with the same arguments except `out`
    signature = [(a.name, str(a.type)) for a in schema_of(op).arguments if a.alias_info is None]
    packet = getattr(packets, name)
    for overload in packet.overloads():
        overload_of_packet = getattr(packet, overload)
        if (
            not schema_of(overload_of_packet).is_mutable
            and [(a.name, str(a.type)) for a in schema_of(overload_of_packet).arguments] == signature
        ):
            return overload_of_packet
    return op


RULES: dict[OpOverload, Callable[..., Any]] = {}
# Rules in StableHLO's own operations, for overloads whose rule in `RULES` calls LAPACK.
PORTABLE_RULES: dict[OpOverload, Callable[..., Any]] = {}
# Overloads with rules registered by users (`custom_ops.py`), which may differ in the next process.
OF_USERS: set[OpOverload] = set()
# Operations that hold Programs: their rules also take `lower`, which lowers one.
OF_PROGRAMS: set[OpOverload] = set()
# Matrix operations whose rules also take `by_columns`: for each matrix, whether it is stored by columns.
OF_ORDERS: set[OpOverload] = set()


def portable_rule(overload: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the rule of `overload` for modules that run on other machines."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PORTABLE_RULES[overload] = function
        return function

    return register


def rule(*overloads: OpOverload | str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the lowering of `overloads`; each overload has one.

    An overload that some versions of PyTorch lack is given by name, "cholesky.default", and skipped if it is missing.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in filter(None, map(_present, overloads)):
            if overload in RULES:
                raise ValueError(f"{overload} already has a lowering: {RULES[overload].__qualname__}")
            RULES[overload] = function
        return function

    return enter


def register(overload: OpOverload, function: Callable[..., Any]) -> None:
    """Register a function from a table of rules, named after its overload."""
    function.__name__ = function.__qualname__ = str(overload)
    rule(overload)(function)


def _present(overload: OpOverload | str) -> OpOverload | None:
    if isinstance(overload, OpOverload):
        return overload
    name, _, variant = overload.partition(".")
    return getattr(getattr(torch.ops.aten, name, None), variant, None)


LIST = Path(__file__).with_name("rules.txt")


@functools.cache
def listed() -> frozenset[str]:
    """The names of the overloads that have a rule."""
    return frozenset(LIST.read_text().split())


# PyTorch's dtypes that have a counterpart in XLA, of the same name.
XLA_DTYPES = (
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.bfloat16,
    torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


def is_certain(node: Node) -> bool:
    """Whether a node can be lowered, as far as is known without lowering it: its operation has a rule, which takes all
    arguments, and its results have dtypes of XLA's. A decomposition may call what has no rule."""
    op = functional(node.op)
    if not (_is_listed(node.op) or node.op in RULES) or any(value.dtype not in XLA_DTYPES for value in node.outputs):
        return False
    if op is aten.index_put.default:  # a mask beside another index selects a number of elements that depends on values
        indices = [index.dtype for index in node.args[1] if index is not None]
        return len(indices) < 2 or not {torch.bool, torch.uint8} & {*indices}
    return bool(node.kwargs.get("pivot", True))  # LU without pivoting is for GPUs


@functools.cache
def _is_listed(op: OpOverload) -> bool:
    return str(functional(op)) in listed() or str(op) in listed()
