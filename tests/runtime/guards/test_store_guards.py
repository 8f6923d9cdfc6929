"""State that a step sets, mostly to its current value, and that others change between steps: after each call it is as
in eager PyTorch."""

import array
import collections
import contextvars
import csv
import ctypes
import dataclasses
import decimal
import functools
import gc
import io
import itertools
import os
import random
import struct
import sys
import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, TraceError
from firstloss.runtime.guards.native import native
from firstloss.runtime.step import compiling, tracing
from firstloss.runtime.step.tracing import trace_step
from tests import small_training
from tests.compiled_steps import check_runs_eagerly
from tests.fuzz.interpret import interpreted

ON, OFF = "on", "off"
CASES = {}


def case(make):
    """Register a function of a model and an optimizer that returns a setter (for ON and OFF) and a getter."""
    CASES[make.__name__] = make
    return make


def attribute_of(make, by_string=False):
    def case_of(m, o):
        held = make()

        def put(value):
            held.value = value

        def put_by_string(value, name=("value",)):
            setattr(held, *name, value)

        return put_by_string if by_string else put, lambda: held.value

    return case_of


class Plain:
    value = ON


class Slotted:
    __slots__ = ("value",)

    def __init__(self):
        self.value = ON


class Property:
    def __init__(self):
        self._value = ON

    @property
    def value(self):
        return self._value

    @value.setter
    def value(self, value):
        self._value = value


class OwnSetter:
    def __setattr__(self, name, value):
        super().__setattr__("own_" + name, value)

    @property
    def value(self):
        return self.__dict__.get("own_value", ON)


@dataclasses.dataclass
class Data:
    value: str = ON


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: str = ON


def with_value(held):
    held.value = ON
    return held


for kind in (Plain, Slotted, Property, OwnSetter, Data):
    CASES[f"an attribute of {kind.__name__}"] = attribute_of(kind)
for kind in (types.SimpleNamespace, ValueError, functools.partial, nn.ReLU, lambda: torch.ones(2)):
    name = "a tensor" if isinstance(kind, types.FunctionType) else kind.__name__
    CASES[f"an attribute of {name}"] = attribute_of(
        lambda kind=kind: with_value(kind(int) if kind is functools.partial else kind())
    )
CASES["an attribute of a module"] = attribute_of(lambda: with_value(types.ModuleType("mine")))
for name, make in {
    "a function": lambda: with_value(lambda: None),
    "a class": lambda: type("Own", (), {"value": ON}),
}.items():
    CASES[f"an attribute of {name}"] = attribute_of(make)
    CASES[f"an attribute of {name}, by a string"] = attribute_of(make, by_string=True)
CASES["an attribute of Plain, by a string"] = attribute_of(Plain, by_string=True)


@case
def optimizer_attribute(m, o):
    def put(value):
        o.value = value

    return put, lambda: o.value


@case
def model_attribute(m, o):
    def put(value):
        m.value = value

    return put, lambda: m.value


@case
def weight_attribute(m, o):
    def put(value):
        m.weight.value = value

    return put, lambda: m.weight.value


@case
def set_by_a_method(m, o):
    class Meter:
        def put(self, value):
            self.value = value

    meter = Meter()
    return meter.put, lambda: meter.value


@case
def object_setattr(m, o):
    held = Frozen()
    return lambda value: object.__setattr__(held, "value", value), lambda: held.value


@case
def vars_item(m, o):
    held = Plain()
    return lambda value: vars(held).update(value=value), lambda: held.value


@case
def key_of_an_empty_dict(m, o):
    held = types.SimpleNamespace(own=type("Empty", (), {})())

    def put(value):
        if value == ON:
            held.own.__dict__.pop("value", None)
        else:
            held.own.__dict__["value"] = value

    return put, lambda: dict(vars(held.own))


@case
def set_and_restored(m, o):
    held = Plain()

    def put(value):
        held.value = OFF
        held.value = value

    return put, lambda: held.value


@case
def deleted_attribute(m, o):
    held = Plain()

    def put(value):
        held.value = value
        if value == ON:
            del held.value

    return put, lambda: "value" in vars(held)


STATE = ON


@case
def global_name(m, o):
    def put(value):
        global STATE
        STATE = value

    return put, lambda: STATE


@case
def globals_item(m, o):
    return lambda value: globals().__setitem__("STATE", value), lambda: STATE


@case
def closure_variable(m, o):
    held = ON

    def put(value):
        nonlocal held
        held = value

    return put, lambda: held


@case
def sys_attribute(m, o):
    def put(value):
        sys.fuzzed = value

    return put, lambda: sys.fuzzed


@case
def torch_attribute(m, o):
    def put(value):
        torch.nn.functional.fuzzed = value

    return put, lambda: F.fuzzed


@case
def dict_item(m, o):
    held = {}
    return lambda value: held.update(value=value), lambda: held["value"]


@case
def set_member(m, o):
    held = {ON}
    return lambda value: (held.add if value == ON else held.discard)(ON), lambda: ON in held


@case
def full_deque(m, o):
    held = collections.deque([ON, ON], maxlen=2)
    return held.append, lambda: list(held)


@case
def emptied_list(m, o):
    held = []
    return lambda value: held.clear() if value == ON else held.append(value), lambda: list(held)


@case
def numpy_array(m, o):
    held = np.zeros(3)
    return lambda value: held.fill(value == ON), held.tolist


@case
def module_buffer(m, o):
    held = array.array("d", [0.0])
    return lambda value: held.__setitem__(0, float(value == ON)), held.tolist


@case
def ctypes_memory(m, o):
    held = (ctypes.c_int * 2)()

    def put(value):
        held[0] = int(value == ON)

    return put, lambda: list(held)


@case
def context_variable(m, o):
    held = contextvars.ContextVar("held", default=ON)
    return lambda value: (held.set(value), None)[1], held.get


@case
def environment_variable(m, o):
    def put(value):
        os.environ["FIRSTLOSS_STORED"] = value

    return put, lambda: os.environ.get("FIRSTLOSS_STORED")


@case
def environment_variable_deleted(m, o):
    def put(value):
        if value == ON:
            os.environ.pop("FIRSTLOSS_STORED", None)
        else:
            os.environ["FIRSTLOSS_STORED"] = value

    return put, lambda: os.environ.get("FIRSTLOSS_STORED")


@case
def random_instance(m, o):
    held = random.Random(0)
    return lambda value: held.seed(value == ON), held.getstate


@case
def random_module(m, o):
    return lambda value: random.seed(value == ON), random.getstate


@case
def numpy_random(m, o):
    return lambda value: np.random.seed(value == ON), lambda: np.random.get_state()[1].tolist()


@case
def torch_generator(m, o):
    held = torch.Generator()
    return lambda value: held.manual_seed(int(value == ON)) and None, lambda: held.get_state().tolist()


@case
def torch_global_generator(m, o):
    return lambda value: torch.manual_seed(int(value == ON)) and None, lambda: torch.get_rng_state().tolist()


@case
def decimal_precision(m, o):
    def put(value):
        decimal.getcontext().prec = 28 if value == ON else 10

    return put, lambda: decimal.getcontext().prec


@case
def training_mode(m, o):
    return lambda value: m.train(value == ON) and None, lambda: m.training


@case
def training_mode_restored(m, o):
    return lambda value: (m.eval(), m.train(value == ON)) and None, lambda: m.training


@case
def requires_grad(m, o):
    def put(value):
        m.bias.requires_grad_(value == ON)

    return put, lambda: m.bias.requires_grad


@case
def cleared_gradient(m, o):
    held = nn.Parameter(torch.ones(2))

    def put(value):
        held.grad = None if value == ON else torch.ones(2)

    return put, lambda: held.grad is None


@case
def learning_rate(m, o):
    def put(value):
        for group in o.param_groups:
            group["lr"] = 0.1 if value == ON else 0.3

    return put, lambda: o.param_groups[0]["lr"]


@case
def weight_decay(m, o):
    def put(value):
        o.param_groups[0]["weight_decay"] = 0.1 if value == ON else 0.3

    return put, lambda: o.param_groups[0]["weight_decay"]


@case
def group_tag(m, o):
    return lambda value: o.param_groups[0].update(tag=value), lambda: o.param_groups[0]["tag"]


@case
def function_code(m, o):
    def one():
        return ON

    def two():
        return OFF

    codes = {ON: one.__code__, OFF: two.__code__}
    return lambda value: setattr(one, "__code__", codes[value]), lambda: one()


@case
def object_class(m, o):
    held, other = Plain(), type("Other", (), {})
    return lambda value: setattr(held, "__class__", Plain if value == ON else other), lambda: type(held) is Plain


@case
def cleared_cache(m, o):
    @functools.lru_cache
    def cached(x):
        return x

    return lambda value: cached.cache_clear() if value == ON else cached(1) and None, lambda: cached.cache_info()[3]


SETTINGS = {
    "gc.isenabled": (gc.isenabled, lambda value: gc.enable() if value == ON else gc.disable()),
    "gc.get_threshold": (gc.get_threshold, lambda value: gc.set_threshold(700 if value == ON else 800, 10, 10)),
    "recursion": (sys.getrecursionlimit, lambda value: sys.setrecursionlimit(3000 if value == ON else 4000)),
    "folder": (os.getcwd, lambda value: os.chdir("/" if value == ON else os.path.dirname(__file__))),
    "threads": (torch.get_num_threads, lambda value: torch.set_num_threads(1 + (value == ON))),
    "deterministic": (
        torch.are_deterministic_algorithms_enabled,
        lambda value: torch.use_deterministic_algorithms(value == ON, warn_only=True),
    ),
    "precision": (
        torch.get_float32_matmul_precision,
        lambda value: torch.set_float32_matmul_precision("highest" if value == ON else "high"),
    ),
    "default dtype": (
        torch.get_default_dtype,
        lambda value: torch.set_default_dtype(torch.float32 if value == ON else torch.float64),
    ),
    "numpy's errors": (
        lambda: np.geterr()["divide"],
        lambda value: np.seterr(divide="ignore" if value == ON else "warn") and None,
    ),
}
for name, (show, put) in SETTINGS.items():
    CASES[name] = lambda m, o, put=put, show=show: (put, show)

# The calls, out of eight, before which others set something, and what; two in a row, so that a graph is reused.
OTHERWISE = {2: OFF, 4: OFF, 5: OFF, 6: ON}


@pytest.fixture(autouse=True)
def restore_state(monkeypatch):
    """Restores the state that cases set; steps are interpreted, which is faster than compiling them."""
    monkeypatch.setattr(compiling, "compile_step", interpreted)
    # NumPy's error state first, since the setter that restores it raises under the others' settings
    states = random.getstate(), np.random.get_state(), np.geterr(), decimal.getcontext().prec
    settings = gc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), os.getcwd(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    np.seterr(**states[2])
    decimal.getcontext().prec = states[3]
    (gc.enable if settings[0] else gc.disable)()
    gc.set_threshold(*settings[1])
    sys.setrecursionlimit(settings[2])
    os.chdir(settings[3])
    torch.set_num_threads(settings[4])
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float32)
    os.environ.pop("FIRSTLOSS_STORED", None)
    for module in (sys, F):
        vars(module).pop("fuzzed", None)


def run(make, backend, first, late, others=OTHERWISE):
    """The losses, and the state after each call.

    Args:
        first: what the step sets; None for now ON and now OFF. Before the first call it is ON.
        late: whether at its end, and not at its beginning.
        others: what others set, by the number of the call before which they do.
    """
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(3, 2)
    compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), 0.1)
    put, show = make(model, optimizer)
    put(ON)

    flag = types.SimpleNamespace(on=True)

    @fl.trace
    def step(x):
        value = first if first is not None else ON if flag.on else OFF
        if not late:
            put(value)
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        if late:
            put(value)
        return loss

    batches = torch.Generator().manual_seed(1)
    losses, states = [], []
    for i in range(8):
        flag.on = i % 5 < 3
        if i in others:
            put(others[i])
        losses.append(step(torch.randn(4, 3, generator=batches, dtype=torch.float32)))
        states.append(show())
    put(ON)
    return [loss.item() for loss in losses], states, model.weight.detach().numpy()


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize(
    ("first", "late"),
    [
        pytest.param(ON, False, id="on"),
        pytest.param(OFF, True, id="off at the end"),
        pytest.param(None, True, id="either, at the end"),
        pytest.param(ON, True, id="on, at the end", marks=pytest.mark.sweep),
        pytest.param(OFF, False, id="off", marks=pytest.mark.sweep),
        pytest.param(None, False, id="either", marks=pytest.mark.sweep),
    ],
)
@pytest.mark.parametrize("name", CASES)
def test_stores_match_eager(name, first, late):
    eager = run(CASES[name], fl.backend("CPU"), first, late)
    actual = run(CASES[name], fl.backend("XLA"), first, late)
    assert actual[1] == eager[1]
    np.testing.assert_allclose(actual[0], eager[0], rtol=1e-5)  # float32, other kernels
    np.testing.assert_allclose(actual[2], eager[2], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(native is None, reason="without the part in C, a step reads all of a SimpleNamespace")
@pytest.mark.parametrize(
    "name", ["an attribute of Plain", "global_name", "closure_variable", "training_mode", "gc.isenabled"]
)
def test_unchanged_stores_are_traced_twice(name, monkeypatch):
    """Again to verify the second call, since the first could not know."""
    traces = []
    monkeypatch.setattr(
        tracing, "trace_step", lambda *args, **more: (traces.append(args), trace_step(*args, **more))[1]
    )
    run(CASES[name], fl.backend("XLA"), ON, late=False, others={})
    assert len(traces) == 2


def endless(numbers):
    while True:
        yield from numbers


def one_by_one(numbers):
    for number in numbers:
        kept = number
        yield kept  # the position is not observable if the number is the same again


def without_names():
    while True:
        yield 1.0
        yield 2.0


NUMBERS = [1.0, 1.0, 2.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0]
ITERATORS = {
    "endless": lambda: endless([1.0, 2.0]),
    "one by one": lambda: one_by_one(NUMBERS),
    "without names": without_names,
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "chain": lambda: itertools.chain(one_by_one(NUMBERS[:4]), NUMBERS[4:]),
    "map": lambda: map(abs, one_by_one(NUMBERS)),
    "enumerate": lambda: (number for _, number in enumerate(one_by_one(NUMBERS))),
    "StringIO": lambda: map(float, io.StringIO("1\n2\n3\n" * 9)),
    "zip": lambda: (a for a, _ in zip(one_by_one(NUMBERS), itertools.repeat(1), strict=False)),
}


UNREADABLE = {
    "struct.iter_unpack": (lambda: struct.iter_unpack("b", bytes(range(1, 40))), lambda item: item[0]),
    "csv.reader": (lambda: csv.reader(["1", "2", "3"] * 9), lambda row: float(row[0])),
    "numpy.flatiter": (lambda: np.arange(1.0, 40.0).flat, float),
    "zip of one": (lambda: zip(struct.iter_unpack("b", bytes(range(1, 40)))), lambda item: item[0][0]),
}


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning", "ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("edits", [False, True], ids=["", "a trace fails"])
@pytest.mark.parametrize("name", UNREADABLE)
def test_iterators_that_cannot_be_set_back_advance_once_a_call(name, edits):
    """A trace that fails after it has advanced one is an error: the step's Python cannot run once more."""
    make, number = UNREADABLE[name]

    def losses(backend):
        numbers, held = make(), np.ones(2)

        @fl.trace
        def step(x):
            scale = number(next(numbers))
            if edits:
                held[0] += 1  # behind PyTorch's back
            return (x * torch.from_numpy(held).to(x.dtype)).sum() * scale

        fl.backend(backend)
        return [step(torch.ones(2)).item() for _ in range(9)]

    if edits:
        with pytest.raises(TraceError, match="bypassing PyTorch"):
            losses("XLA")
    else:
        assert losses("XLA") == losses("CPU")


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("name", ITERATORS)
def test_iterators_advance_as_in_eager(name):
    """Also if their position is the same as before, as far as it is observable. Only Python advances them."""

    def losses(backend):
        numbers = ITERATORS[name]()

        @fl.trace
        def step(x):
            return x.sum() * next(numbers)

        return [step(torch.ones(2)).item() for _ in range(9)]

    assert losses(fl.backend("XLA")) == losses(fl.backend("CPU"))


@pytest.mark.parametrize("module", [random, np.random], ids=["random", "numpy.random"])
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_random_generators_advance_as_in_eager(module):
    """Others seed them before each call; draws after the call continue after the step's."""

    def drawn(backend):
        @fl.trace
        def step(x):
            return x.sum() * module.random()

        results = []
        for seed in (1, 1, 1, 2, 2, 1, 1):
            module.seed(seed)
            results += [step(torch.ones(2)).item(), module.random()]
        return results

    actual, eager = drawn(fl.backend("XLA")), drawn(fl.backend("CPU"))
    np.testing.assert_allclose(actual, eager, rtol=1e-6)  # the losses are float32


def test_the_environment_of_others_is_left_alone():
    """A variable that the step sets is set at each call; no other variable is restored."""

    @fl.trace
    def step(x):
        os.environ["FIRSTLOSS_STORED"] = "mine"
        return x.sum()

    with fl.backend("XLA").device:
        for i in range(4):
            os.environ["FIRSTLOSS_OTHERS"] = str(i)
            os.environ.pop("FIRSTLOSS_STORED", None)
            step(torch.ones(2))
            assert os.environ["FIRSTLOSS_STORED"] == "mine"
            assert os.environ.pop("FIRSTLOSS_OTHERS") == str(i)


EDITED = {
    "array": lambda: (lambda held: (lambda: held.__setitem__(0, 5.0), torch.from_numpy(held)))(np.ones(3, np.float32)),
    "buffer": lambda: (lambda held: (lambda: held.__setitem__(3, 65), torch.frombuffer(held, dtype=torch.float32)))(
        bytearray(np.ones(3, np.float32).tobytes())
    ),
    "half": lambda: (lambda held: (lambda: held.__setitem__(3, 65), torch.frombuffer(held, dtype=torch.bfloat16)))(
        bytearray(8)
    ),
    "a part": lambda: (lambda held: (lambda: held.__setitem__(0, 5.0), torch.from_numpy(held)[1:]))(np.ones(3)),
}


@pytest.mark.parametrize("name", EDITED)
def test_memory_edited_through_another_object_matches_eager(name):
    """The step's Python runs at each call: the compiler does not see such edits."""

    def results(backend, **options):
        edit, seen = EDITED[name]()

        def step(x):
            edit()
            return x.sum() + seen.sum()

        step = fl.trace(step, **options) if backend == "XLA" else step
        fl.backend(backend)
        before = seen.clone()
        try:
            return [step(torch.ones(2) * i) for i in range(3)], seen
        except TraceError:
            assert torch.equal(seen, before)
            raise

    with pytest.warns(EagerStepWarning, match="bypassing PyTorch"):
        actual, left = results("XLA")
    expected, left_by_eager = results("CPU")
    assert all(map(torch.equal, actual, expected)) and torch.equal(left, left_by_eager)
    with pytest.raises(TraceError, match="bypassing PyTorch"):
        results("XLA", reads="refuse")


def test_arrays_edited_together_with_arguments_match_eager():
    """While a step is traced, the arguments have no memory that could be an array's."""
    held, leaf = np.zeros(3), torch.ones(3, requires_grad=True)

    @fl.trace
    def step(x):
        held[:] = held * 0.5 + 1
        return (leaf * x).sum() * held[0]

    def losses(backend):
        held[:] = 0
        return [step(torch.ones(3)).item() for _ in range(4)]

    assert losses(fl.backend("XLA")) == losses(fl.backend("CPU"))


def test_data_of_an_outside_tensor_matches_eager():
    def run(backend, trace):
        held, other = torch.zeros(2), torch.ones(2)

        @trace
        def step(x):
            held.data = other
            return x.sum()

        step(torch.ones(2))
        other.add_(1)
        return held

    check_runs_eagerly(run, "memory from outside of the step")


def test_its_own_generator_matches_eager():
    def run(backend, trace):
        generator = torch.Generator().manual_seed(5)

        @trace
        def step(x):
            return x * torch.rand(2, generator=generator)

        return [step(torch.ones(2)) for _ in range(3)]

    check_runs_eagerly(run, "generator of its own")


@pytest.mark.parametrize("before", [False, True])
def test_a_rate_that_the_step_decays(before):
    def train(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), 0.1)

        @fl.trace
        def step(x):
            if before:
                optimizer.param_groups[0]["lr"] *= 0.5
            compiled(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not before:
                optimizer.param_groups[0]["lr"] *= 0.5
            return optimizer.param_groups[0]["lr"]

        rates = [step(torch.ones(2, 3)) for _ in range(5)]
        assert all(type(rate) is float for rate in rates)
        return rates, optimizer.param_groups[0]["lr"], model.weight.detach().numpy()

    eager, actual = train(fl.backend("CPU")), train(fl.backend("XLA"))
    assert actual[:2] == eager[:2]
    np.testing.assert_allclose(actual[2], eager[2], rtol=1e-5)  # float32, other kernels


def test_a_rate_known_only_on_the_device_matches_eager():
    def run(backend, trace):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(3, 2)
        compiled, optimizer = fl.compile(model, backend), torch.optim.SGD(model.parameters(), 0.1)

        @trace
        def step(x):
            compiled(x).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = x.mean()

        for i in range(3):
            step(torch.ones(2, 3) * i)
        return optimizer.param_groups[0]["lr"], [p.detach().clone() for p in model.parameters()]

    check_runs_eagerly(run, "'lr' in a parameter group")


def test_steps_guard_pytorchs_current_settings(backend, by_kernels, traced, monkeypatch):
    """A step that sets a function there guards only its previous value."""
    monkeypatch.setattr(F, "celu", F.celu)
    _, _, compiled = small_training.build(backend)

    @fl.trace
    def replaces(x):
        torch.nn.functional.celu = F.elu
        return compiled(x).sum()

    @fl.trace
    def plain(x):
        return compiled(x).mean()

    x = torch.ones(2, 4)
    plain(x)  # the previous value is recorded
    replaces(x)
    traced.clear()
    for _ in range(4):
        plain(x)
    assert F.celu is F.elu and len(traced) == 1
