"""Settings of the process, the thread or the context around a call of a step match eager PyTorch."""

import asyncio
import contextlib
import csv
import decimal
import functools
import gc
import io
import locale
import logging
import math
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from os import environ as variables
from sys import exc_info as being_handled
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo  # PyTorch imports it at some first use, in which sympy leaves a warning filter

import firstloss as fl
from firstloss.errors import GraphChangeWarning
from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted
from tests.small_training import scaled_step

CASES = {}
STEPS = 7
OTHERS = (3, 4)  # the calls around which it is set


def case(make):
    """Register a function that returns the loss's factor, and the context around calls 3 and 4."""
    CASES[make.__name__] = make
    return make


class Handling(NamedTuple):
    """The call is made while an exception is being handled."""

    error: Exception


@contextlib.contextmanager
def done(do, undo):
    do()
    try:
        yield
    finally:
        undo()


# -- an exception that the caller handles --


@case
def handled_exception():
    return lambda: 1.0 if sys.exc_info()[0] is None else 2.0, lambda: Handling(ValueError(3))


@case
def exc_info_by_alias():
    return lambda: 1.0 if being_handled()[0] is None else 2.0, lambda: Handling(ValueError(3))


@case
def exception_arguments():
    numbers = iter(range(2, 9))
    return (
        lambda: float(sys.exc_info()[1].args[0]) if sys.exc_info()[1] else 1.0,
        lambda: Handling(ValueError(next(numbers))),
    )


@case
def formatted_exception():
    return lambda: 1.0 + len(traceback.format_exc().splitlines()[-1]), lambda: Handling(ValueError("some words"))


@case
def reraised_exception():
    def get():
        try:
            raise
        except ValueError:
            return 2.0
        except RuntimeError:
            return 1.0

    return get, lambda: Handling(ValueError(3))


@case
def exception_context():
    def get():
        try:
            raise KeyError
        except KeyError as error:
            return 1.0 if error.__context__ is None else 2.0

    return get, lambda: Handling(ValueError(3))


@case
def exception_in_exit():
    def get():
        with contextlib.ExitStack() as stack:
            stack.callback(len, ())
        return 1.0

    return get, lambda: Handling(ValueError(3))


# -- NumPy's --


def numpy_division():
    try:
        return 1.0 + np.isinf(np.ones(2) / np.zeros(2)).sum()
    except FloatingPointError:
        return 2.0


@case
def numpy_error_state():
    return numpy_division, lambda: np.errstate(divide="raise")


@case
def numpy_error_callback():
    called = []

    def get():
        np.log(np.zeros(3))
        return 1.0 + len(called)

    return get, lambda: np.errstate(divide="call", call=lambda *_: called.append(1))


@case
def numpy_print_options():
    return lambda: 1.0 + len(str(np.full(1, math.pi))), lambda: np.printoptions(precision=2)


# -- warnings --


def warned():
    try:
        warnings.warn("this is old", DeprecationWarning, stacklevel=2)
        return 1.0
    except DeprecationWarning:
        return 2.0


@contextlib.contextmanager
def warnings_as(action):
    with warnings.catch_warnings():
        warnings.simplefilter(action)
        warnings.simplefilter("ignore", GraphChangeWarning)
        yield


@case
def warnings_as_errors():
    return warned, lambda: warnings_as("error")


@case
def numpy_warnings_as_errors():
    def get():
        try:
            np.log(np.zeros(3))
            return 1.0
        except RuntimeWarning:
            return 2.0

    return get, lambda: warnings_as("error")


@case
def warning_filters():
    return lambda: 2.0 if warnings.filters[1][0] == "error" else 1.0, lambda: warnings_as("error")


@case
def warnings_caught_in_the_step():
    def get():
        with warnings.catch_warnings(record=True) as record:
            warnings.warn("this is old", UserWarning, stacklevel=2)
        return 1.0 + len(record)

    return get, lambda: warnings_as("always")


# -- the environment --


@contextlib.contextmanager
def variable(name, value):
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.__setitem__(name, before)


@case
def expandvars():
    return lambda: 1.0 + len(os.path.expandvars("$SOME_SCALE")), lambda: variable("SOME_SCALE", "ab")


@case
def home_directory():
    return lambda: 1.0 + len(os.path.expanduser("~")), lambda: variable("HOME", "/somewhere/else")


@case
def environment_by_alias():
    return lambda: float(variables.get("SOME_SCALE", 1)), lambda: variable("SOME_SCALE", "2")


@case
def environment_by_bound_method():
    get = os.environ.get
    return lambda: float(get("SOME_SCALE", 1)), lambda: variable("SOME_SCALE", "2")


@case
def environment_subset():
    return lambda: float(functools.partial(os.getenv, "SOME_SCALE")() or 1), lambda: variable("SOME_SCALE", "2")


@case
def environment_as_bytes():
    return lambda: float(os.environb.get(b"SOME_SCALE", 1)), lambda: variable("SOME_SCALE", "2")


@case
def temporary_directory():
    def get():
        tempfile.tempdir = None
        return 1.0 + len(tempfile.gettempdir())

    return get, lambda: variable("TMPDIR", "/var/tmp")


# -- the process --


@case
def umask():
    def get():
        mask = os.umask(0)
        os.umask(mask)
        return 1.0 + mask

    return get, lambda: done(lambda: os.umask(0o77), lambda: os.umask(0o22))


@case
def signal_handlers():
    def get():
        before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, before)
        return 2.0 if before is signal.SIG_IGN else 1.0

    return get, lambda: done(
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    )


@case
def resource_limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    other = before[0] // 2, before[1]
    return (
        lambda: 1.0 + resource.getrlimit(resource.RLIMIT_NOFILE)[0] / 1000,
        lambda: done(
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, other),
            lambda: resource.setrlimit(resource.RLIMIT_NOFILE, before),
        ),
    )


@case
def int_to_str_digits():
    limit = sys.get_int_max_str_digits()

    def get():
        try:
            return 1.0 + (int("1" * 5000) > 0)
        except ValueError:
            return 3.0

    return get, lambda: done(lambda: sys.set_int_max_str_digits(0), lambda: sys.set_int_max_str_digits(limit))


@case
def max_str_digits():
    limit = sys.get_int_max_str_digits()
    return (
        lambda: 1.0 + sys.get_int_max_str_digits() / 1000,
        lambda: done(lambda: sys.set_int_max_str_digits(0), lambda: sys.set_int_max_str_digits(limit)),
    )


@case
def csv_field_size_limit():
    limit = csv.field_size_limit()

    def get():
        try:
            return float(len(next(csv.reader(["a" * 20]))[0]))
        except csv.Error:
            return 1.0

    return get, lambda: done(lambda: csv.field_size_limit(10), lambda: csv.field_size_limit(limit))


@case
def csv_dialects():
    return (
        lambda: 1.0 + len(csv.list_dialects()),
        lambda: done(lambda: csv.register_dialect("mine", delimiter=";"), lambda: csv.unregister_dialect("mine")),
    )


@case
def csv_dialect():
    csv.register_dialect("ours", delimiter=",")
    return (
        lambda: float(len(next(csv.reader(["1;2,3;4"], dialect="ours")))),
        lambda: done(
            lambda: csv.register_dialect("ours", delimiter="1"), lambda: csv.register_dialect("ours", delimiter=",")
        ),
    )


@case
def socket_timeout():
    return (
        lambda: socket.getdefaulttimeout() or 1.0,
        lambda: done(lambda: socket.setdefaulttimeout(2.0), lambda: socket.setdefaulttimeout(None)),
    )


@case
def gc_enabled():
    return lambda: 1.0 + gc.isenabled(), lambda: done(gc.disable, gc.enable)


@case
def gc_debug_flags():
    return (
        lambda: 1.0 + gc.get_debug(),
        lambda: done(lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE), lambda: gc.set_debug(0)),
    )


@case
def stdout():
    return lambda: 2.0 if isinstance(sys.stdout, io.StringIO) else 1.0, lambda: contextlib.redirect_stdout(
        io.StringIO()
    )


@case
def trace_function():
    before = sys.gettrace()
    return (
        lambda: 1.0 if sys.gettrace() is before else 2.0,
        lambda: done(lambda: sys.settrace(lambda *_: None), lambda: sys.settrace(before)),
    )


@case
def thread_name():
    name = threading.current_thread().name
    return (
        lambda: 1.0 + len(threading.current_thread().name),
        lambda: done(
            lambda: setattr(threading.current_thread(), "name", "other"),
            lambda: setattr(threading.current_thread(), "name", name),
        ),
    )


@case
def excepthook():
    before = sys.excepthook
    return (
        lambda: 1.0 if sys.excepthook is before else 2.0,
        lambda: done(lambda: setattr(sys, "excepthook", print), lambda: setattr(sys, "excepthook", before)),
    )


@case
def sys_path():
    return (
        lambda: 1.0 + ("/nowhere" in sys.path),
        lambda: done(lambda: sys.path.append("/nowhere"), lambda: sys.path.remove("/nowhere")),
    )


@case
def random_numbers():
    state = random.Random(3).getstate()
    return random.random, lambda: done(lambda: random.setstate(state), lambda: random.seed(1))


# -- the context --


@case
def decimal_precision():
    return lambda: float(decimal.Decimal(1) / decimal.Decimal(3)), lambda: decimal.localcontext(decimal.Context(prec=2))


@case
def decimal_setcontext():
    def set_to(prec):
        return lambda: setattr(decimal.getcontext(), "prec", prec)

    return lambda: float(1 / decimal.Decimal(3)), lambda: done(set_to(2), set_to(28))


@case
def decimal_rounding():
    return (
        lambda: float(round(decimal.Decimal("2.5") * decimal.Decimal("0.1"), 1) + decimal.Decimal("1")),
        lambda: decimal.localcontext(decimal.Context(rounding=decimal.ROUND_UP)),
    )


@case
def decimal_traps():
    def get():
        try:
            return 1.0 + decimal.Decimal("Infinity").is_infinite() + (decimal.Decimal(1) / 0).is_infinite()
        except decimal.DivisionByZero:
            return 1.0

    return get, lambda: decimal.localcontext(decimal.Context(traps=[]))


@case
def running_event_loop():
    def get():
        try:
            asyncio.get_running_loop()
            return 2.0
        except RuntimeError:
            return 1.0

    loop = asyncio.new_event_loop()
    return get, lambda: done(lambda: asyncio._set_running_loop(loop), lambda: asyncio._set_running_loop(None))


# -- logging and locale --


@case
def logging_level():
    logger = logging.getLogger("around")
    return (
        lambda: 2.0 if logger.isEnabledFor(logging.INFO) else 1.0,
        lambda: done(lambda: logger.setLevel(logging.DEBUG), lambda: logger.setLevel(logging.ERROR)),
    )


@case
def logging_disabled():
    logger = logging.getLogger("around.all")
    logger.setLevel(logging.DEBUG)
    return (
        lambda: 2.0 if logger.isEnabledFor(logging.INFO) else 1.0,
        lambda: done(lambda: logging.disable(logging.ERROR), lambda: logging.disable(logging.NOTSET)),
    )


@case
def numeric_locale():
    def get():
        return 1.0 + len(f"{1234567:n}")

    return get, lambda: done(
        lambda: locale.setlocale(locale.LC_NUMERIC, "C"), lambda: locale.setlocale(locale.LC_NUMERIC, "C")
    )


# -- PyTorch's --


@case
def deterministic_algorithms():
    return (
        lambda: 1.0 + torch.are_deterministic_algorithms_enabled(),
        lambda: done(
            lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)
        ),
    )


@case
def autocast():
    return lambda: 1.0 + torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", enabled=True)


@case
def default_dtype():
    return (
        lambda: 1.0 + torch.get_default_dtype().itemsize,
        lambda: done(lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    )


def losses(backend, make):
    torch.manual_seed(0)
    random.seed(0)
    generator = torch.Generator().manual_seed(1)
    get, around = make()
    step = scaled_step(backend, get)

    results = []
    for i in range(STEPS):
        x = torch.randn(5, 4, generator=generator, dtype=torch.float32)
        within = around() if i in OTHERS else contextlib.nullcontext()
        if isinstance(within, Handling):
            try:
                raise within.error
            except type(within.error):
                results.append(step(x))
            continue
        with within:
            results.append(step(x))
    return [float(loss) for loss in results]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_settings_around_a_call_match_eager(name, monkeypatch):
    monkeypatch.setattr(compiling, "compile_step", interpreted)
    eager = losses(fl.backend("CPU"), CASES[name])
    traced = losses(fl.backend("XLA"), CASES[name])
    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=0)  # float32, seven steps


# Settings that a step changes without restoring them: how, how they are read, and how the caller restores them between
# calls.
LEFT = {
    "numpy": (lambda: np.seterr(divide="raise"), np.geterr, lambda: np.seterr(divide="warn")),
    "numpy_calls": (lambda: np.seterrcall(print), np.geterrcall, lambda: np.seterrcall(None)),
    "decimals": (lambda: setattr(decimal.getcontext(), "prec", 3), lambda: repr(decimal.getcontext()),
                 lambda: setattr(decimal.getcontext(), "prec", 28)),
    "traps": (lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, True),
              lambda: decimal.getcontext().traps[decimal.Inexact],
              lambda: decimal.getcontext().traps.__setitem__(decimal.Inexact, False)),
    "digits": (lambda: sys.set_int_max_str_digits(0), sys.get_int_max_str_digits,
               lambda: sys.set_int_max_str_digits(4300)),
    "collector": (lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE), gc.get_debug, lambda: gc.set_debug(0)),
    "errors": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters), warnings.resetwarnings),
    "ignored": (lambda: warnings.simplefilter("ignore"), lambda: list(warnings.filters), warnings.resetwarnings),
    "one_ignored": (lambda: warnings.filterwarnings("ignore", "this", UserWarning), lambda: list(warnings.filters),
                    warnings.resetwarnings),
}  # fmt: skip


@pytest.mark.parametrize("back", [False, True], ids=["left", "set back"])
@pytest.mark.parametrize("name", LEFT)
@pytest.mark.filterwarnings("ignore")
def test_process_settings_made_by_a_step_match_eager(name, back, monkeypatch):
    monkeypatch.setattr(compiling, "compile_step", interpreted)
    change, read, undo = LEFT[name]

    @fl.trace
    def step(x):
        change()
        return 2 * x

    def settings(backend):
        fl.backend(backend)
        with warnings.catch_warnings():
            undo()
            seen = [read()]
            for i in range(STEPS):
                step(torch.ones(2) * i)
                seen.append(read())
                if back and i in OTHERS:
                    undo()
            undo()
        return seen

    assert settings("XLA") == settings("CPU")
