"""PyTorch's own samples, cut into logical shards along each dimension of each argument, against the same rule uncut.

python -m tests.lower.cut_samples --limit 4       # a table, on standard output
"""

from __future__ import annotations

import argparse
import collections
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from firstloss.lower import logical_shards, shard_passes
from tests.op_db import op_db

from .harness import Check, assert_same, to_tensor
from .sweep import key_of, record_samples

SHARDS = 2
PROGRAM = 100  # cuts that are compiled as one program


class CutCall:
    """A recorded operation with one argument cut along one dimension.

    Attributes:
        problem: how it differs from the operation uncut; None if it does not.
        primitives: those of its operations that are computed by logical shards.
        gathered: those that need a cut value whole.
    """

    def __init__(self, check: Check, argument: int, dim: int) -> None:
        self.check, self.argument, self.dim = check, argument, dim
        self.problem: str | None = None
        cuts = [dim if n == argument else None for n in range(len(check.arrays))]
        closed = jax.make_jaxpr(lambda *arrays: check.run(arrays))(*check.arrays)
        self.function = logical_shards.cut(closed, cuts, SHARDS)
        loops = [operation for loop in self.function.loops for operation in loop]
        self.primitives = {op.equation.eqn.primitive.name for op in loops if op.equation is not None}
        self.gathered = sum(map(len, self.function.gathered))

    def run(self, arrays: Sequence[Any], more: Any) -> list[Any]:
        whole: list[Any] = [()] * len(arrays)
        outs: list[Any] = [()] * len(self.function.outputs)
        return shard_passes.run(self.function, arrays, whole, outs, {}, more)

    def compare(self, results: Sequence[Any], uncut: Sequence[Any]) -> None:
        for actual, expected, leaf in zip(results, uncut, self.check.leaves, strict=True):
            try:
                assert_same(to_tensor(actual, leaf.dtype), to_tensor(expected, leaf.dtype))
            except AssertionError as error:
                shapes = [tuple(array.shape) for array in self.check.arrays]
                self.problem = (
                    f"{self.check.overload} of {shapes} cut along dimension {self.dim} of argument {self.argument}: "
                    + " ".join(str(error).split())[:300]
                )


def cuts_of(
    op: Any, dtype: torch.dtype, limit: int, fitting: Callable[[CutCall], bool] = lambda cut: True
) -> list[CutCall]:
    """The operations of an operation's samples, in every way in which one argument can be cut, compared."""
    recorded, _ = record_samples(op, dtype, limit, True)
    calls = {key_of(call): call for calls in recorded for call in calls}
    cuts = []
    with jax.enable_x64(True):
        for call in calls.values():
            check = Check(call)
            if check.problem or any(math.prod(array.shape) == 0 for array in check.arrays):
                continue
            try:
                jax.eval_shape(lambda *arrays, check=check: check.run(arrays), *check.arrays)
            except Exception:  # the sweep's business
                continue
            if check.problem:
                continue
            for argument, array in enumerate(check.arrays):
                for dim, size in enumerate(array.shape):
                    if size % SHARDS == 0:
                        cut = CutCall(check, argument, dim)
                        if cut.primitives and fitting(cut):
                            cuts.append(cut)
        for begin in range(0, len(cuts), PROGRAM):
            _compare(cuts[begin : begin + PROGRAM])
    return cuts


def _compare(cuts: Sequence[CutCall]) -> None:
    def run(arrays: Sequence[Any], more: Any) -> Any:
        pairs = list(zip(cuts, arrays, strict=True))
        return [cut.run(own, more) for cut, own in pairs], [cut.check.run(own) for cut, own in pairs]

    results, uncut = jax.jit(run)([cut.check.arrays for cut in cuts], 0)
    for cut, result, expected in zip(cuts, results, uncut, strict=True):
        cut.compare(result, expected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    primitives: collections.Counter[str] = collections.Counter()
    count = whole = 0
    for op in op_db:
        if args.only not in op.name or not op.supports_dtype(getattr(torch, args.dtype), "cpu"):
            continue
        cuts = cuts_of(op, getattr(torch, args.dtype), args.limit)
        count += len(cuts)
        whole += sum(cut.gathered > 0 for cut in cuts)
        for cut in cuts:
            primitives.update(cut.primitives)
            if cut.problem:
                print(op.name, cut.problem, flush=True)
    print(count, "cuts,", whole, "of them with values that are gathered")
    print(dict(primitives))


if __name__ == "__main__":
    main()
