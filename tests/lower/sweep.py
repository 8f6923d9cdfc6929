"""Drive the rules by PyTorch's own samples (OpInfo), forward and backward.

Each sample is run eagerly while the ATen operations below autograd are recorded; each recorded operation that has a
rule is then compared with what eager gave. A sample passes when all its operations have rules and agree.

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

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

from .harness import Recorder, check, is_checked, is_strided

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def samples_of(op, dtype: torch.dtype, limit: int, grad: bool) -> Iterator:
    """At most `limit` samples, spread evenly over those that OpInfo has."""
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 200))
    step = max(1, len(every) // limit)
    return every[::step][:limit]


def record(op, sample, grad: bool) -> list:
    """The operations of one sample; with `grad`, of its backward pass too."""
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


def sweep_op(op, dtype: torch.dtype, limit: int, grad: bool) -> list[str | None]:
    """The problem of each sample, None for those that pass."""
    recorded: list = []
    problems: list[str | None] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(samples_of(op, dtype, limit, grad))
    except Exception as error:
        return [f"sample: {error}"[:200]]
    for sample in samples:
        if not is_strided((sample.input, sample.args, sample.kwargs)):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                recorded.append(record(op, sample, grad))
        except Exception as error:
            problems.append(f"eager: {type(error).__name__} {error}"[:200])
    distinct = {key_of(call): call for calls in recorded for call in calls}
    checks = check(list(distinct.values()))
    found = {
        key: c.problem
        for key, c in zip((k for k, call in distinct.items() if is_checked(call[0])), checks, strict=True)
    }
    for calls in recorded:
        problems.append(next((found[key_of(c)] for c in calls if found.get(key_of(c))), None))
    return problems


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
        for name in options.dtypes:
            dtype = getattr(torch, name)
            if not op.supports_dtype(dtype, "cpu"):
                continue
            grad = not options.no_grad and op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            label = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {name}"
            start = time.perf_counter()
            with contextlib.redirect_stderr(None):
                problems = sweep_op(op, dtype, options.limit, grad)
            outcomes[label] = problems
            good, counts = problems.count(None), collections.Counter(p for p in problems if p)
            print(f"{label}: {good}/{len(problems)} {time.perf_counter() - start:.1f}s", flush=True)
            for problem, times in counts.most_common(2):
                print(f"    {times}x {problem}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(outcomes, file, indent=1)
    total = sum(len(p) for p in outcomes.values())
    good = sum(p.count(None) for p in outcomes.values())
    print(f"{good} of {total} samples pass")


if __name__ == "__main__":
    main()
