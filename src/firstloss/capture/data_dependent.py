"""Errors for data-dependent Python in a traced step: what to write instead.

While a step is traced no tensor has a value: none can be read, and no result's size can depend on one. The error says
so in the user's own words, which Python knows to the column, and names the static way to write that very operation.
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

_PLACES = (
    "torch.nonzero_static(mask, size=n) gives n places, filled up with -1; torch.where(mask, a, b), with three "
    "arguments, computes at every place and needs no places at all."
)
_UNIQUE = (
    "Sort, and compare neighbours: s = x.sort().values; first = s[1:] != s[:-1] marks where another value begins, and "
    "first.sum() + 1 is how many there are. Of n values known beforehand, F.one_hot(ids, n).any(0) says which occur."
)
_MASKED = (
    "Keep the size, and let the mask choose: torch.where(mask, x, 0).sum(), divided by mask.sum() for a mean; "
    "torch.where(mask, f(x), x) to compute at the selected places."
)

# Operations whose result's size depends on values, by ATen's name.
SIZES = {
    "nonzero": _PLACES,
    "argwhere": _PLACES,
    "masked_select": _MASKED,
    "index": _MASKED + " To write there, x[mask] = v works as it is, with a v that broadcasts; "
    "for x[mask] += v write x += torch.where(mask, v, 0), for x[mask] = y[mask], x = torch.where(mask, y, x).",
    "_unique": _UNIQUE,
    "_unique2": _UNIQUE,
    "unique_dim": _UNIQUE,
    "unique_consecutive": _UNIQUE,
    "unique_dim_consecutive": _UNIQUE,
    "repeat_interleave": "Say how long the result is: torch.repeat_interleave(x, repeats, output_size=n) works, n "
    "being the sum of repeats; or torch.gather with places of a fixed size.",
    "bincount": "With n known bins: torch.zeros(n, dtype=torch.long).scatter_add(0, ids, torch.ones_like(ids)), or "
    "F.one_hot(ids, n).sum(0).",
    "_pack_padded_sequence": "Run on the padded batch, and leave the padding out of the loss: torch.where(mask, loss, "
    "0).sum() / mask.sum().",
    "linalg_lstsq": "Solve it by a factorisation, whose results have known sizes: q, r = torch.linalg.qr(A); "
    "torch.linalg.solve_triangular(r, q.mH @ B, upper=True); or torch.linalg.pinv(A) @ B, if A may have a lower rank.",
    "_to_sparse": "Keep the tensor dense, and multiply or torch.where with its mask.",
}

_CONSTANT = (
    " What is the same at every step (a mask of ones, say) make within the step, instead of giving it as an argument: "
    "what is computed from constants alone has a value."
)
_READ = (
    "Go on computing with the tensor, by torch.where(condition, a, b) if something depends on it; to read or print "
    "it, return it from the step, or give it to fl.step_closure." + _CONSTANT
)
_BRANCH = (
    "Compute both and choose: torch.where(condition, a, b), or torch.cond. What need not be decided within the step, "
    "decide outside, on a tensor that it returns." + _CONSTANT
)
_COMPARE = (
    "(a == b).all() and torch.isclose(a, b).all() are tensors, which torch.where(condition, x, y) takes; or return "
    "one from the step and look at it outside."
)
_SIZE = (
    "A size, or a place in a Python list, has to be known beforehand. At a place that a tensor names, look up by "
    "x.index_select(0, i) or torch.gather; for the first k of n, torch.where(torch.arange(n) < k, x, 0)."
)

# Expressions that read a value, by the name that the user calls.
VALUES = {
    **dict.fromkeys(("if", "bool", "is_nonzero", "max", "min", "sorted", "any", "all", "while"), _BRANCH),
    "assert": "Return the tensor from the step and assert outside, or in fl.step_closure; torch.where(condition, a, "
    "b) keeps what is wrong out of the result.",
    **dict.fromkeys(("equal", "allclose"), _COMPARE),
    "one_hot": "Say how many classes there are: F.one_hot(ids, num_classes=n).",
    **dict.fromkeys(("slice", "range", "arange", "linspace", "zeros", "ones", "empty", "full", "topk"), _SIZE),
    "tensor_split": "Say in Python where to split: x.tensor_split((2, 5)).",
    **dict.fromkeys(("narrow", "expand", "view", "reshape", "repeat", "pad", "split", "chunk"), _SIZE),
}

_BACKWARD = (
    "This is the backward pass of something whose value or size is chosen by values; for "
    "x.index_put((mask,), v), with a v that wants a gradient, write x[mask] = v or x = torch.where(mask, v, x)."
)


_ANOMALY = (
    "torch.autograd.set_detect_anomaly(True) looks at the values of each gradient. Look for anomalies on backend "
    "'CPU', where the step is not compiled, or ask in a step closure whether the loss and the weights are finite."
)


class ValueRequest(NamedTuple):
    """Who asks for a value: the line, the expression as written, if it is known, and what kind it is."""

    source: Source
    text: str
    kind: str


def advice(op: OpOverload, asked: ValueRequest, reads: bool) -> str:
    """What to write instead of `asked`, which came down to `op`."""
    name = op.overloadpacket.__name__
    if asked.kind in ("backward", "grad") and torch.is_anomaly_enabled():
        return _ANOMALY
    if asked.kind in ("backward", "grad") and not reads:
        return _BACKWARD
    if reads or name in VALUES:
        return VALUES.get(asked.kind) or VALUES.get(name) or _READ
    return SIZES.get(name, "Compute with tensors instead: torch.where(condition, a, b), with a mask for a selection.")


def message(op: OpOverload) -> str:
    """The error for `op`, which the user's present line has come to."""
    name = op.overloadpacket.__name__
    reads = name == "_local_scalar_dense"
    asked = value_request()
    words = f"`{asked.text}`" if asked.text else "this line"
    if reads:
        what = f"{words} asks for a value"
    elif name in SIZES:
        what = f"the size of what {words} makes depends on values ({op})"
    else:
        what = f"what {words} gives depends on values ({op})"
    return (
        f"{asked.source}: {what}, while the step is being traced, when no tensor has a value yet. "
        f"{advice(op, asked, reads)}"
    )


def value_request() -> ValueRequest:
    """The user's expression that is being evaluated."""
    frame = user_frame()
    if frame is None:
        return ValueRequest(UNKNOWN, "", "")
    instruction = next((i for i in dis.get_instructions(frame.f_code) if i.offset == frame.f_lasti), None)
    source = Source(frame.f_code.co_filename, frame.f_lineno)
    text = _text(frame)
    kind = _kind(text)
    name = instruction.opname if instruction is not None else ""
    if ("JUMP" in name and "_IF_" in name) or name in ("TO_BOOL", "UNARY_NOT"):
        line = linecache.getline(source.file, source.line)
        kind = "assert" if line.lstrip().startswith("assert") else "if"
    return ValueRequest(source, textwrap.shorten(text, 80, placeholder=" ..."), kind)


def is_shown() -> bool:
    """Whether the user's expression only shows what it is given: to whoever reads the output, a log, or a debugger."""
    frame = user_frame()
    if frame is None or frame.f_globals.get("__name__") in _SHOW:
        return True
    return _kind(_text(frame)) == "print"


_SHOW = {"logging", "traceback", "pdb", "pydevd"}


def _text(frame: FrameType) -> str:
    """The source of what `frame` evaluates, or nothing if it is not known."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    first, last, begin, end = positions
    if first is None or last is None or begin is None or end is None:
        return ""
    lines = [linecache.getline(frame.f_code.co_filename, n).encode() for n in range(first, last + 1)]
    lines[-1] = lines[-1][:end]  # columns are counted in bytes
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")


def _kind(text: str) -> str:
    """The name that is called in an expression; "slice" where something is indexed."""
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
