"""Chains: element-by-element edits that follow a random fill, run on each piece while it is still in the cache.

timm's `trunc_normal_` is `uniform_`, `erfinv_`, `mul_`, `add_`, `clamp_`, each over the whole weight. Done piece by
piece the weight goes through memory once instead of five times, and every core takes part in all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..program.graph import Node, Ref, Value
from ..rng import native

aten = torch.ops.aten

# In-place operations whose result at an element depends on that element and Python numbers alone, and whose kernels
# give the same bits wherever an element lies: those that IEEE 754 rounds exactly, and erfinv_, of which PyTorch has
# one kernel for vectors and their ends alike (`tests/init/test_chains.py`).
_EDITS = {
    aten.erfinv_.default,
    aten.mul_.Tensor,
    aten.mul_.Scalar,
    aten.add_.Tensor,
    aten.add_.Scalar,
    aten.sub_.Tensor,
    aten.sub_.Scalar,
    aten.div_.Tensor,
    aten.div_.Scalar,
    aten.clamp_.default,
    aten.clamp_min_.default,
    aten.clamp_max_.default,
    aten.neg_.default,
    aten.abs_.default,
    aten.sqrt_.default,
}


def find_chains(nodes: list[Node], fills: list[Node], wanted: set[Value]) -> dict[Node, list[Node]]:
    """For each of `fills` the edits among `nodes` that follow it, of whose steps nobody else sees anything."""
    users: dict[Value, list[Node]] = {}
    for node in nodes:
        for value in {*node.reads(), *(ref.value for ref in node.writes)}:
            users.setdefault(value, []).append(node)
    chains: dict[Node, list[Node]] = {}
    for fill in fills:
        chain: list[Node] = []
        shown, value = fill.writes[0], fill.outputs[0]
        while value not in wanted and len(users.get(value, ())) == 1 and _is_edit(users[value][0], shown):
            chain.append(users[value][0])
            value = chain[-1].outputs[0]
        if chain:
            chains[fill] = chain
    return chains


def _is_edit(node: Node, shown: Ref) -> bool:
    if node.op not in _EDITS or len(node.writes) != 1:
        return False
    target = node.writes[0]
    numbers = all(isinstance(a, (int, float, type(None))) for a in (*node.args[1:], *node.kwargs.values()))
    return numbers and target[1:] == shown[1:]


class Finish(NamedTuple):
    """The end of a chain, for which there is a native kernel: times, plus, between; each may be there or not."""

    factor: float = 1.0
    term: float = -0.0  # what changes no number when it is added, not even the sign of zero
    low: float = -math.inf
    high: float = math.inf

    def write(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write the finished `source` to `target`: float32, contiguous, as long."""
        native.finish(target.data_ptr(), source.data_ptr(), source.numel(), *self)


def split_finish(chain: list[Node]) -> tuple[list[Node], Finish | None]:
    """A chain without its end, and its end; None where it does not end so."""
    found = Finish()
    rest = list(chain)
    for kinds, read in _ENDS:
        if rest and rest[-1].op in kinds:
            numbers = read(rest[-1])
            if numbers is not None:
                found, _ = found._replace(**numbers), rest.pop()
    return rest, found if len(rest) < len(chain) else None


def _number(name: str) -> Callable[[Node], dict[str, float] | None]:
    def read(node: Node) -> dict[str, float] | None:
        number = node.args[1] if len(node.args) == 2 and not node.kwargs else None
        return {name: number} if isinstance(number, (int, float)) and math.isfinite(number) else None

    return read


def _bounds(node: Node) -> dict[str, float] | None:
    given = dict(zip(("min", "max"), node.args[1:], strict=False)) | node.kwargs
    numbers = {place: given[name] for place, name in (("low", "min"), ("high", "max")) if given.get(name) is not None}
    return numbers if all(math.isfinite(number) for number in numbers.values()) else None


# From the last to the first.
_ENDS: tuple[tuple[set, Callable[[Node], dict[str, float] | None]], ...] = (
    ({aten.clamp_.default}, _bounds),
    ({aten.add_.Tensor, aten.add_.Scalar}, _number("term")),
    ({aten.mul_.Tensor, aten.mul_.Scalar}, _number("factor")),
)


def apply(chain: list[Node], piece: torch.Tensor) -> None:
    """Run the edits on a part of the weight."""
    for node in chain:
        node.op(piece, *node.args[1:], **node.kwargs)
