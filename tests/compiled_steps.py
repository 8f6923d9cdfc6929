"""Accessors for the compiled steps of a traced step: the only test code that depends on the cache's structure."""

import functools

import pytest
import torch

import firstloss as fl
from firstloss.errors import CaptureError, EagerStepWarning, LoweringError, TraceError


def compilations(step):
    """How many times the step has been compiled."""
    return step._cache.compilations()


def kinds(step):
    """The number of kinds of calls for which the step has been compiled."""
    return len(step._cache.kinds)


def latest(step):
    """The `CompiledStep` of the last call."""
    return step._cache.latest


def segment_calls(compiled):
    """The segment calls of a `CompiledStep`, in order; identical segments share a function."""
    return compiled.executable._calls


def segment_executables(compiled):
    """The executables of its distinct segments, by function number; waits until they are compiled."""
    executable = compiled.executable
    return {n: executable._compiled._futures[n].result() for n in sorted({c.function for c in executable._calls})}


def segment_result_counts(compiled):
    """The number of results of each distinct segment, by function number."""
    return {number: len(function.result_order) for number, function in compiled.executable._functions.items()}


def steps(step):
    """All `CompiledStep`s, one for each trace that is kept."""
    return step._cache.steps()


def check_runs_eagerly(run, match, **close):
    """Check that a step that cannot be compiled runs as in eager PyTorch, with a warning, and is an error on request.

    Args:
        run: given a backend, and in place of `fl.trace` a function that traces a step; returns results.
        match: in the warning, and in the error.
        close: tolerances of `torch.testing.assert_close`; none by default.
    """
    expected = run(fl.backend("CPU"), fl.trace)
    with pytest.warns(EagerStepWarning, match=match):
        actual = run(fl.backend("XLA"), fl.trace)
    torch.testing.assert_close(actual, expected, **(close or {"rtol": 0, "atol": 0}))
    with pytest.raises((TraceError, LoweringError, CaptureError), match=match):
        run(fl.backend("XLA"), functools.partial(fl.trace, reads="refuse"))
