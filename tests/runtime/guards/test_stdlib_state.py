"""State in Python's standard library that a step reads is guarded: changes between two calls are detected."""

import builtins
import collections
import contextvars
import ctypes
import decimal
import enum
import logging
import sys
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.runtime.step import compiling
from tests.fuzz import interpret

PLACES = {}


class Kept:
    scale = 2.0


def place(f):
    PLACES[f.__name__] = f
    return f


@place
def ctypes_structure():
    class Pair(ctypes.Structure):
        _fields_ = [("scale", ctypes.c_double)]

    pair = Pair(2.0)
    return lambda: pair.scale, lambda: setattr(pair, "scale", 7.0)


@place
def ctypes_array():
    array = (ctypes.c_double * 2)(2.0, 1.0)
    return lambda: array[0], lambda: array.__setitem__(0, 7.0)


@place
def enum_value():
    class Settings(enum.Enum):
        FIRST = {"scale": 2.0}

    return lambda: Settings.FIRST.value["scale"], lambda: Settings.FIRST.value.update(scale=7.0)


@place
def metaclass():
    class Meta(type):
        scale = 2.0

    class Made(metaclass=Meta):
        pass

    return lambda: Made.scale, lambda: setattr(Meta, "scale", 7.0)


@place
def shadowed_class_attribute():
    base = type("Base", (), {"scale": 2.0})
    derived = type("Derived", (base,), {})
    return lambda: derived.scale, lambda: setattr(derived, "scale", 7.0)


@place
def context_variable_default():
    variable = contextvars.ContextVar("variable", default={"scale": 2.0})  # noqa: B039 - as users do
    return lambda: variable.get()["scale"], lambda: variable.get().update(scale=7.0)


@place
def list_in_a_context_variable():
    variable = contextvars.ContextVar("variable")
    variable.set([2.0])
    return lambda: variable.get()[0], lambda: variable.get().__setitem__(0, 7.0)


@place
def object_array():
    array = np.array([[{"scale": 2.0}]], dtype=object)
    return lambda: array[0, 0]["scale"], lambda: array[0, 0].update(scale=7.0)


@place
def logger_level():
    logger = logging.getLogger("tests.firstloss.places")
    logger.setLevel(logging.INFO)
    return lambda: 2.0 if logger.isEnabledFor(logging.INFO) else 7.0, lambda: logger.setLevel(logging.ERROR)


@place
def decimal_precision():
    decimal.getcontext().prec = 28
    return lambda: float(decimal.Decimal(1) / 3), lambda: setattr(decimal.getcontext(), "prec", 2)


@place
def default_factory():
    table = np.ones(3)
    tensors = collections.defaultdict(lambda: torch.from_numpy(table))

    def read():
        tensors["h"].add_(1)  # it is in the array's memory
        return tensors["h"].sum()

    def change():
        tensors.clear()
        tensors.default_factory = lambda: torch.full((3,), 7.0)

    return read, change


@place
def lock():
    held = threading.Lock()
    return lambda: 7.0 if held.locked() else 2.0, held.acquire


@place
def mapping_proxy():
    kept = Kept()
    proxy = weakref.proxy(kept)
    return lambda: proxy.scale, lambda: setattr(kept, "scale", 7.0)


@place
def module_attribute():
    sys.firstloss_scale = 2.0  # type: ignore[attr-defined]
    return lambda: sys.firstloss_scale, lambda: setattr(sys, "firstloss_scale", 7.0)  # type: ignore[attr-defined]


@place
def builtin_name():
    builtins.firstloss_scale = 2.0  # type: ignore[attr-defined]
    return lambda: firstloss_scale, lambda: setattr(builtins, "firstloss_scale", 7.0)  # type: ignore[name-defined] # noqa: F821


def program(backend, make):
    torch.manual_seed(0)
    model = fl.compile(nn.Linear(4, 3), backend)
    read, change = make()

    @fl.trace
    def step(x):
        return model(x).square().mean() * read()

    with decimal.localcontext():
        for i in range(5):
            if i == 3:
                change()
            yield step(torch.randn(6, 4)).detach().clone()


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("make", PLACES.values(), ids=PLACES)
def test_changes_are_detected(make, backend, monkeypatch):
    monkeypatch.setattr(compiling, "compile_step", interpret.interpreted)
    expected = list(program(fl.backend("CPU"), make))
    torch.testing.assert_close(list(program(fl.backend(backend), make)), expected, rtol=0, atol=0)
