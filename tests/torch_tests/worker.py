"""Run the tests of one file in one mode, and print each outcome as a JSON line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import traceback
import types
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import firstloss as fl
from tests.fuzz.oracle import _Noise

from .ways import Trail, client, run

PASSED, SKIPPED, REFUSED, FAILED, DIFFERS, LATE, ENDED = (
    "passed",
    "skipped",
    "refused",
    "failed",
    "differs",
    "late",
    "ended",
)


def load(file: Path) -> types.ModuleType:
    """The module of a test file."""
    folder = next((f for f in file.parents if f.name == "test"), file.parent)
    for place in (folder, file.parent):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def tests_of(module: types.ModuleType) -> list[unittest.TestCase]:
    """The tests of a module, in the order of their names."""
    loader = unittest.TestLoader()

    def flat(suite: Any) -> Iterator[unittest.TestCase]:
        for part in suite:
            if isinstance(part, unittest.TestSuite):
                yield from flat(part)
            else:
                yield part

    classes = [
        value
        for _, value in sorted(vars(module).items())
        if isinstance(value, type) and issubclass(value, unittest.TestCase)
    ]
    tests = [test for cls in classes for test in flat(loader.loadTestsFromTestCase(cls))]
    return sorted({test.id(): test for test in tests}.values(), key=name_of)


def name_of(test: unittest.TestCase) -> str:
    return f"{type(test).__name__}.{test._testMethodName}"


class _Result(unittest.TestResult):
    """Keeps the first error of a test with its traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.verdict = PASSED
        self.error: BaseException | None = None
        self.reason = ""

    def addError(self, test: Any, err: Any) -> None:
        self.verdict, self.error = FAILED, self.error or err[1]

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(subtest, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.verdict, self.reason = SKIPPED, reason

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        pass

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.verdict, self.reason = FAILED, "passes, where a failure is expected"


def outcome(test: unittest.TestCase, way: str, artifacts: str, verbose: bool = False) -> tuple[dict[str, Any], Trail]:
    """The outcome of one test."""
    result = _Result()
    with warnings.catch_warnings():
        if way != "eager":
            # These warnings are intended, and must not count in tests that count PyTorch's warnings.
            warnings.simplefilter("ignore", fl.errors.GraphChangeWarning)
        try:
            times = 2 if way == "whole" and _passes_twice(test, artifacts) else 1
            with client(way, artifacts) as trail:
                run(test, way, result, times)
        except Exception as error:
            result.addError(test, (type(error), error, None))
            trail = []
    row: dict[str, Any] = {"test": name_of(test), "verdict": result.verdict}
    if result.error is not None:
        if verbose:
            traceback.print_exception(result.error)
        own = _ours(result.error)
        if own is not None:
            row["verdict"] = REFUSED
        row["why"] = words(own or result.error)
    elif result.reason:
        row["why"] = result.reason
    return row, trail


def _passes_twice(test: unittest.TestCase, artifacts: str) -> bool:
    """Whether eager PyTorch passes a test whose method runs twice: the first run may leave state that breaks the
    second."""
    result = _Result()
    with client("eager", artifacts):
        run(type(test)(test._testMethodName), "eager", result, times=2)
    return result.verdict == PASSED


def _ours(error: BaseException) -> BaseException | None:
    """Firstloss's error in the causes of `error`."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        if isinstance(error, fl.errors.FirstlossError):
            return error
        seen.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return None


def words(error: BaseException) -> str:
    """An error's type and first lines, without the location."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:3] if line.strip())
    text = re.sub(r"\S*?([\w]+\.py):\d+", r"\1", text)
    text = re.sub(r"0x[0-9a-f]+", "0x...", text)
    return f"{type(error).__name__}: {text}"[:400]


def apart(eager: Trail, other: Trail, least: torch.dtype = torch.float64) -> str | None:
    """Where the values of models and optimizers differ from eager's by more than rounding in their dtype, or in `least`
    if that is less exact; None if they do not."""
    if [kind for kind, _ in eager] != [kind for kind, _ in other]:
        return f"{len(eager)} calls and steps, and {len(other)} on the backend"
    for number, ((kind, actual), (_, expected)) in enumerate(zip(eager, other, strict=True)):
        if len(actual) != len(expected):
            return f"{kind}, number {number}: {len(actual)} tensors, and {len(expected)} on the backend"
        for a, b in zip(actual, expected, strict=True):
            if a.dtype != b.dtype or a.shape != b.shape:
                return f"{kind}, number {number}: {a.dtype} {tuple(a.shape)}, and {b.dtype} {tuple(b.shape)}"
            if not a.is_floating_point() and not a.is_complex():
                near = torch.equal(a, b)
            else:
                # About a thousand roundings in another order, in 20 steps or calls, of numbers of this size.
                eps = max(torch.finfo(a.dtype).eps, torch.finfo(least).eps)
                scale = a.abs().nan_to_num(0, 0, 0).max().item() if a.numel() else 0.0
                near = torch.allclose(a, b, rtol=2000 * eps, atol=1000 * eps * max(scale, 1e-3), equal_nan=True)
            if not near:
                return f"{kind}, number {number}: off by {(a - b).abs().nan_to_num(0).max().item():.1e}"
    return None


def sensitive(test: unittest.TestCase, expected: Trail, artifacts: str) -> bool:
    """Whether rounding errors of a few units in the last place make a difference in eager PyTorch itself: the gradients
    of a convolution before a batch norm are zero up to rounding, and Adam divides by them."""
    again = type(test)(test._testMethodName)
    with client("eager", artifacts) as trail, _Noise():
        run(again, "eager", _Result())
    return apart(expected, trail) is not None


def main() -> None:
    file, way, artifacts, trails, pattern = sys.argv[1:6]
    done = set(os.environ.get("FIRSTLOSS_CLIENTS_DONE", "").split())
    verbose = bool(os.environ.get("FIRSTLOSS_CLIENTS_VERBOSE"))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tests' output is not an outcome
    for test in tests_of(load(Path(file))):
        name = name_of(test)
        if name in done or not re.search(pattern, name):
            continue
        print(json.dumps({"test": name, "verdict": "begun"}), file=out, flush=True)
        row, trail = outcome(test, way, artifacts, verbose)
        kept = Path(trails) / f"{name}.pt"
        if way == "eager":
            torch.save(trail if len(trail) < 2000 else [], kept)
        elif way != "whole" and row["verdict"] == PASSED and kept.exists():
            expected = torch.load(kept)
            # Step counts are float32, and so are values computed from them (docs/optimizers.md).
            least = torch.float32 if way == "steps" else torch.float64
            where = apart(expected, trail, least) if expected else None
            if where is not None and not sensitive(test, expected, artifacts):
                row |= {"verdict": DIFFERS, "why": where}
        print(json.dumps(row), file=out, flush=True)


if __name__ == "__main__":
    main()
