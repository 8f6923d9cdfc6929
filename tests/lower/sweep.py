"""Test the rules with PyTorch's own samples (OpInfo), forward and backward.

Each sample is run eagerly while the ATen operations below autograd are recorded; each recorded operation that has a
rule is then compared with eager's result. A sample passes if all its operations have rules and agree.

    python -m tests.lower.sweep --limit 4 --dtypes float32 bfloat16   # a table, on standard output
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import re
import time
import warnings
from collections.abc import Iterator

import jax
import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.op_db import op_db

from .harness import Recorder, check, is_checked, is_strided

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def samples_of(op, dtype: torch.dtype, limit: int, grad: bool) -> Iterator:
    """At most `limit` samples, spread evenly over OpInfo's."""
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 200))
    step = max(1, len(every) // limit)
    return every[::step][:limit]


def record(op, sample, grad: bool) -> list:
    """The operations of one sample; with `grad`, also of its backward pass."""
    with Recorder() as recorder:
        output = op(sample.input, *sample.args, **sample.kwargs)
        if grad:
            outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.requires_grad]
            inputs = [
                x
                for x in tree_leaves((sample.input, sample.args, sample.kwargs))
                if isinstance(x, torch.Tensor) and x.requires_grad and x.is_leaf
            ]
            if outputs and inputs:
                weights = [torch.linspace(0.5, 1.5, x.numel()).to(x.dtype).reshape(x.shape) for x in outputs]
                torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return recorder.calls


def key_of(call) -> str:
    overload, args, kwargs, _ = call

    def shown(x):
        if isinstance(x, torch.Tensor):
            return (
                tuple(x.shape),
                x.dtype,
                float(x.double().abs().nan_to_num().sum()) if x.layout == torch.strided and not x.is_complex() else 0,
            )
        return x

    return f"{overload}{tree_map(shown, (args, kwargs))}"


def record_samples(op, dtype: torch.dtype, limit: int, with_grad: bool) -> tuple[list[list], list[str | None]]:
    """The operations of each sample, and the problems of samples that eager itself does not run."""
    grad = with_grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    recorded: list[list] = []
    problems: list[str | None] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            samples = samples_of(op, dtype, limit, grad)
        except Exception as error:
            return [], [f"sample: {error}"[:200]]
        for sample in samples:
            if not is_strided((sample.input, sample.args, sample.kwargs)):
                continue
            try:
                recorded.append(record(op, sample, grad))
            except Exception as error:
                problems.append(f"eager: {type(error).__name__} {error}"[:200])
    return recorded, problems


PROGRAM = 400  # calls compiled as one program: fewer programs compile faster, up to a size


def sweep_op(op, limits: dict[torch.dtype, int], with_grad: bool = True) -> dict[torch.dtype, list[str | None]]:
    """By dtype, the problem of each sample, or None if it passes."""
    samples = {d: record_samples(op, d, limit, with_grad) for d, limit in limits.items() if op.supports_dtype(d, "cpu")}
    every = [call for recorded, _ in samples.values() for calls in recorded for call in calls]
    distinct = {key_of(call): call for call in every if is_checked(call[0])}
    keys, problem_of = list(distinct), {}
    for i in range(0, len(keys), PROGRAM):
        part = keys[i : i + PROGRAM]
        problem_of |= dict(zip(part, (c.problem for c in check([distinct[k] for k in part])), strict=True))
    outcomes = {}
    for dtype, (recorded, problems) in samples.items():
        firsts = [next((problem_of[k] for k in map(key_of, calls) if problem_of.get(k)), None) for calls in recorded]
        outcomes[dtype] = problems + firsts
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=int, default=4, help="samples per operation and dtype")
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--only", default="", help="a regular expression on the names of operations")
    parser.add_argument("--no-grad", action="store_true")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th operation from the i-th")
    parser.add_argument("--json", help="write the outcome of every sample to this file")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    outcomes: dict = {}
    for op in [op for op in op_db if re.search(options.only, op.name)][part::parts]:
        start = time.perf_counter()
        limits = {getattr(torch, name): options.limit for name in options.dtypes}
        with contextlib.redirect_stderr(None):
            by_dtype = sweep_op(op, limits, not options.no_grad)
        for dtype, problems in by_dtype.items():
            label = f"{op.full_name} {str(dtype).removeprefix('torch.')}"
            outcomes[label] = problems
            good, counts = problems.count(None), collections.Counter(p for p in problems if p)
            print(f"{label}: {good}/{len(problems)} {time.perf_counter() - start:.1f}s", flush=True)
            for problem, times in counts.most_common(2):
                print(f"    {times}x {problem}", flush=True)
        jax.clear_caches()  # thousands of programs would use up the process's memory maps
    if options.json:
        with open(options.json, "w") as file:
            json.dump(outcomes, file, indent=1)
    total = sum(len(p) for p in outcomes.values())
    good = sum(p.count(None) for p in outcomes.values())
    print(f"{good} of {total} samples pass")


if __name__ == "__main__":
    main()
