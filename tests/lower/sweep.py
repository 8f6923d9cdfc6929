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
from collections.abc import Callable, Iterator

import jax
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .harness import NOT_LOWERED, RULES, UNWRITTEN, Recorder, assert_same, functional, to_array, to_tensor, without_out

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]


def samples_of(op, dtype: torch.dtype, limit: int, grad: bool) -> Iterator:
    """At most `limit` samples, spread evenly over those that OpInfo has."""
    torch.manual_seed(0)
    every = list(itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=grad), 200))
    step = max(1, len(every) // limit)
    return every[::step][:limit]


def is_strided(tree) -> bool:
    return all(
        x.layout == torch.strided and not x.is_quantized for x in tree_leaves(tree) if isinstance(x, torch.Tensor)
    )


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


def is_checked(overload) -> bool:
    name = str(overload)
    return name.startswith("aten.") and name not in NOT_LOWERED and not name.startswith(UNWRITTEN)


class Check:
    """One recorded call and what came of comparing it; `problem` is None when its rule agrees with eager."""

    def __init__(self, call):
        overload, self.args, self.kwargs, self.expected = call
        self.overload, self.kwargs = functional(overload), without_out(overload, self.kwargs)
        self.problem: str | None = None
        random = torch.Tag.nondeterministic_seeded in overload.tags
        if self.overload is not overload and self.overload in RULES and not random:
            with torch.no_grad():
                self.expected = self.overload(*self.args, **self.kwargs)
        if random:
            self.problem = "random"
        elif self.overload is None or self.overload not in RULES:
            self.problem = f"no rule: {overload}"
        elif not is_strided((self.args, self.kwargs)):
            self.problem = "not strided"
        self.flat, self.spec = tree_flatten((self.args, self.kwargs))
        try:
            self.arrays = [to_array(x) for x in self.flat if isinstance(x, torch.Tensor)] if not self.problem else []
        except (TypeError, NotImplementedError) as error:
            self.problem, self.arrays = f"{overload}: {error}", []

    def run(self, arrays):
        rest = iter(arrays)
        args, kwargs = self.spec.unflatten([next(rest) if isinstance(x, torch.Tensor) else x for x in self.flat])
        try:
            return [x for x in tree_leaves(RULES[self.overload](*args, **kwargs)) if x is not None]
        except Exception as error:
            self.problem = f"{self.overload}: {type(error).__name__}: {str(error)[:300]}"
            return []

    def compare(self, results, tolerance: Callable) -> None:
        expected = [x for x in tree_leaves(self.expected) if isinstance(x, torch.Tensor)]
        try:
            assert len(results) == len(expected), f"{len(results)} results for {len(expected)}"
            for position, (ours, theirs) in enumerate(zip(results, expected, strict=True)):
                wanted = tolerance(self.overload, position, theirs)
                if wanted == "any":
                    assert tuple(ours.shape) == tuple(theirs.shape)
                else:
                    assert_same(to_tensor(ours, theirs.dtype), theirs, wanted)
        except (AssertionError, ValueError, TypeError) as error:
            shown = tree_map(
                lambda x: f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else x, (self.args, self.kwargs)
            )
            self.problem = f"{self.overload} {shown}: {re.sub(chr(10) + '+', ' ', str(error))[:400]}"


def check(calls: list, tolerance: Callable) -> list[Check]:
    """Compare calls, all compiled as one program: compiling is what takes the time."""
    with jax.enable_x64(True):
        checks = [Check(call) for call in calls if is_checked(call[0])]
        ready = [c for c in checks if not c.problem]
        if ready:
            try:
                results = jax.jit(lambda arrays: [c.run(a) for c, a in zip(ready, arrays, strict=True)])(
                    [c.arrays for c in ready]
                )
            except Exception:  # an operation that XLA itself refuses: find out which
                results = []
                for c in ready:
                    try:
                        results.append(jax.jit(c.run)(c.arrays))
                    except Exception as error:
                        c.problem = f"{c.overload}: {type(error).__name__}: {str(error)[:300]}"
                        results.append([])
            for c, result in zip(ready, results, strict=True):
                if not c.problem:
                    c.compare(result, tolerance)
    return checks


# Results that cannot be compared element by element with the common tolerance, and why.
LOOSER: dict = {
    # Vectors are unique up to a sign or phase, and up to a rotation where values repeat; see test_linalg.py.
    ("aten._linalg_svd.default", 0): "any",
    ("aten._linalg_svd.default", 2): "any",
    ("aten._linalg_eigh.default", 1): "any",
    ("aten.linalg_eig.default", 0): "any",
    ("aten.linalg_eig.default", 1): "any",
    ("aten._linalg_eigvals.default", 0): "any",
    # Of equal values, PyTorch's unstable and partial sorts take any; see test_sorting.py.
    ("aten.sort.default", 1): "any",
    ("aten.topk.default", 1): "any",
    ("aten.kthvalue.default", 1): "any",
    # The sizes of bags are left at 0 by the kernel that does without them.
    ("aten._embedding_bag.default", 2): "any",
    # Unwritten memory, but for maxima, which test_families.py has.
    ("aten._embedding_bag.default", 3): "any",
    # Multiplies by the inverse deviation, up to 1 / sqrt(eps) = 316, what should be 0.
    "aten.native_layer_norm_backward.default": 5e-5,
}


def tolerance_of(overload, position: int, expected: torch.Tensor):
    """The tolerance of one result: None for the dtype's, "any" where PyTorch itself does not fix the values."""
    if expected.dtype not in (torch.float32, torch.complex64, torch.int64):
        return None  # already coarser
    return LOOSER.get((str(overload), position), LOOSER.get(str(overload)))


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
    checks = check(list(distinct.values()), tolerance_of)
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
