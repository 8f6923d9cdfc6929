"""Errors for data-dependent Python in a traced step, with advice on what to write instead.

While a step is traced tensors have no values: none can be read, and the size of a result cannot depend on one. The
error quotes the user's expression, and names a static equivalent of the operation.
"""

from __future__ import annotations

import ast
import dis
import linecache
import textwrap
from types import FrameType
from typing import NamedTuple

import torch

from ..compat.torch_names import OpOverload
from ..program.source import UNKNOWN, Source, user_frame

_INDICES = (
    "torch.nonzero_static(mask, size=n) returns n indices, padded with -1; torch.where(mask, a, b), with three "
    "arguments, computes all elements and needs no indices."
)
_UNIQUE = (
    "Sort, and compare neighbours: s = x.sort().values; first = s[1:] != s[:-1] marks where another value begins, and "
    "first.sum() + 1 is their number. With n known values, F.one_hot(ids, n).any(0) says which occur."
)
_MASKED = (
    "Keep the size, and select by the mask: torch.where(mask, x, 0).sum(), divided by mask.sum() for a mean; "
    "torch.where(mask, f(x), x) to compute only the selected elements."
)

# Operations with a data-dependent result size, by ATen name.
SIZES = {
    "nonzero": _INDICES,
    "argwhere": _INDICES,
    "masked_select": _MASKED,
    "index": _MASKED + " To write, x[mask] = v works as it is, with a v that broadcasts; "
    "for x[mask] += v write x += torch.where(mask, v, 0), for x[mask] = y[mask], x = torch.where(mask, y, x).",
    "_unique": _UNIQUE,
    "_unique2": _UNIQUE,
    "unique_dim": _UNIQUE,
    "unique_consecutive": _UNIQUE,
    "unique_dim_consecutive": _UNIQUE,
    "repeat_interleave": "Give the size of the result: torch.repeat_interleave(x, repeats, output_size=n) works, n "
    "being the sum of repeats; or use torch.gather with a fixed number of indices.",
    "bincount": "With n known bins: torch.zeros(n, dtype=torch.long).scatter_add(0, ids, torch.ones_like(ids)), or "
    "F.one_hot(ids, n).sum(0).",
    "_pack_padded_sequence": "Run on the padded batch, and exclude the padding from the loss: torch.where(mask, loss, "
    "0).sum() / mask.sum().",
    "linalg_lstsq": "Use a factorization, whose results have static sizes: q, r = torch.linalg.qr(A); "
    "torch.linalg.solve_triangular(r, q.mH @ B, upper=True); or torch.linalg.pinv(A) @ B, if A may have a lower rank.",
    "_to_sparse": "Keep the tensor dense, and multiply or torch.where with its mask.",
}

_CONSTANT = (
    " Create what is the same at every step (such as a mask of ones) inside the step, instead of passing it as an "
    "argument: tensors computed from constants alone have a value."
)
_READ = (
    "Go on computing with the tensor, by torch.where(condition, a, b) if something depends on it; to read or print "
    "it, return it from the step, or pass it to fl.step_closure." + _CONSTANT
)
_BRANCH = (
    "Compute both and select: torch.where(condition, a, b), or torch.cond. If the decision can be made outside of the "
    "step, make it there, on a tensor that the step returns." + _CONSTANT
)
_COMPARE = (
    "(a == b).all() and torch.isclose(a, b).all() are tensors, for torch.where(condition, x, y); or return one from "
    "the step and read it outside."
)
_SIZE = (
    "Sizes and indices of Python lists must be static. To index by a tensor, use x.index_select(0, i) or torch.gather; "
    "for the first k of n, torch.where(torch.arange(n) < k, x, 0)."
)

# Expressions that read a value, by the called name.
VALUES = {
    **dict.fromkeys(("if", "bool", "is_nonzero", "max", "min", "sorted", "any", "all", "while"), _BRANCH),
    "assert": "Return the tensor from the step and assert outside, or in fl.step_closure; torch.where(condition, a, "
    "b) excludes invalid elements.",
    **dict.fromkeys(("equal", "allclose"), _COMPARE),
    "one_hot": "Give the number of classes: F.one_hot(ids, num_classes=n).",
    **dict.fromkeys(("slice", "range", "arange", "linspace", "zeros", "ones", "empty", "full", "topk"), _SIZE),
    "tensor_split": "Give the split indices as Python numbers: x.tensor_split((2, 5)).",
    **dict.fromkeys(("narrow", "expand", "view", "reshape", "repeat", "pad", "split", "chunk"), _SIZE),
}

_BACKWARD = (
    "This is the backward pass of a data-dependent operation; for x.index_put((mask,), v), with a v that requires "
    "grad, write x[mask] = v or x = torch.where(mask, v, x)."
)


_ANOMALY = (
    "torch.autograd.set_detect_anomaly(True) reads the values of each gradient. Detect anomalies on backend 'CPU', "
    "where the step is not compiled, or check in a step closure whether the loss and the weights are finite."
)


class ValueRequest(NamedTuple):
    """The user's expression that reads a value: its line, its text, if known, and its kind."""

    source: Source
    text: str
    kind: str


def advice(op: OpOverload, request: ValueRequest, reads: bool) -> str:
    """What to write instead of the expression of `request`, which has called `op`."""
    name = op.overloadpacket.__name__
    if request.kind in ("backward", "grad") and torch.is_anomaly_enabled():
        return _ANOMALY
    if request.kind in ("backward", "grad") and not reads:
        return _BACKWARD
    if reads or name in VALUES:
        return VALUES.get(request.kind) or VALUES.get(name) or _READ
    return SIZES.get(name, "Compute with tensors instead: torch.where(condition, a, b), with a mask for a selection.")


def message(op: OpOverload) -> str:
    """The error message for `op`, called by the user's current line."""
    name = op.overloadpacket.__name__
    reads = name == "_local_scalar_dense"
    request = value_request()
    expression = f"`{request.text}`" if request.text else "this line"
    if reads:
        problem = f"{expression} asks for a value"
    elif name in SIZES:
        problem = f"the size of what {expression} makes depends on values ({op})"
    else:
        problem = f"what {expression} gives depends on values ({op})"
    return (
        f"{request.source}: {problem}, while the step is being traced, when no tensor has a value yet. "
        f"{advice(op, request, reads)}"
    )


def value_request() -> ValueRequest:
    """The user's expression that is currently evaluated."""
    frame = user_frame()
    if frame is None:
        return ValueRequest(UNKNOWN, "", "")
    instruction = next((i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti), None)
    source = Source(frame.f_code.co_filename, frame.f_lineno)
    text = _text(frame)
    kind = _kind(text)
    name = instruction.opname if instruction is not None else ""
    # A comparison asks for a value itself where a jump depends on it, from Python 3.13 on.
    if ("JUMP" in name and "_IF_" in name) or name in ("TO_BOOL", "UNARY_NOT", "COMPARE_OP"):
        line = linecache.getline(source.file, source.line)
        kind = "assert" if line.lstrip().startswith("assert") else "if"
        if kind == "assert" and not text.startswith("assert"):  # the position is of the condition alone from 3.12 on
            text = f"assert {text}"
    return ValueRequest(source, textwrap.shorten(text, 80, placeholder=" ..."), kind)


def is_shown() -> bool:
    """Whether a tensor is only displayed in a debugger or a traceback."""
    frame = user_frame()
    return frame is None or frame.f_globals.get("__name__") in _SHOW


_SHOW = {"traceback", "pdb", "pydevd"}


def _text(frame: FrameType) -> str:
    """The source text of the expression that `frame` evaluates; empty if unknown."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, begin, end = positions
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns are in bytes
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _kind(text: str) -> str:
    """The name of the function that an expression calls; "slice" for an index."""
    try:
        expression = ast.parse(f"({text})", mode="eval").body
    except SyntaxError:
        return ""
    if isinstance(expression, ast.Subscript):
        return "slice"
    if not isinstance(expression, ast.Call):
        return ""
    called = expression.func
    return called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
