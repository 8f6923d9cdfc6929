"""Reads that bypass attribute lookup, changed between steps: as in eager PyTorch.

Reads are recorded by `__getattribute__`; these ways of reading do not call it with the relevant name."""

import copy
import dataclasses
import functools
import hashlib
import inspect
import pickle
import types

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import firstloss as fl
from tests.compiled_steps import check_runs_eagerly


class Plain:
    def __init__(self):
        self.z = 1.0


class Slotted:
    __slots__ = ("z",)

    def __init__(self):
        self.z = 1.0


class Renames(Plain):
    def __getattribute__(self, name):
        return object.__getattribute__(self, "z" if name == "scale" else name)


class AsksItsBase(Plain):
    def __getattribute__(self, name):
        return super().__getattribute__({"scale": "z"}.get(name, name))


class RenamesASlot(Slotted):
    __slots__ = ()

    def __getattribute__(self, name):
        return object.__getattribute__(self, "z" if name == "scale" else name)


class FallsBack:
    def __init__(self):
        self.inner = Plain()

    def __getattr__(self, name):
        return getattr(object.__getattribute__(self, "inner"), name)


class Doubled:
    def __get__(self, owner, cls=None):
        return owner.__dict__["raw"] * 2

    def __set__(self, owner, value):
        owner.__dict__["raw"] = value


class Described:
    z = Doubled()

    def __init__(self):
        self.z = 1.0


class Space(types.SimpleNamespace):
    pass


@dataclasses.dataclass
class Data:
    z: float = 1.0


class Failure(Exception):
    pass


X = torch.ones(2, 3)


def compiled_linear(backend):
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(3, 2)
    return fl.compile(model, backend)


def results(step, change):
    """The losses of six calls; something is changed before the fourth and the sixth."""
    values = []
    for i in range(6):
        if i in (3, 5):
            change(i)
        values.append(step(X).item())
    return values


def check(run):
    """Both backends give the same results for `run(backend)`, and the changes affect them."""
    eager = run(fl.backend("CPU"))
    assert len(set(eager)) > 1
    assert run(fl.backend("XLA")) == pytest.approx(eager, rel=1e-5)  # float32


def space():
    return types.SimpleNamespace(z=1.0)


def set_z(held, value):
    held.z = value


def shown(held):
    return float(repr(held).split("=")[1][:-1])


# How an object is created, read, and changed.
WAYS = {
    "renamed by its class": (Renames, lambda held: held.scale, set_z),
    "renamed, its base asked": (AsksItsBase, lambda held: held.scale, set_z),
    "a slot renamed": (RenamesASlot, lambda held: held.scale, set_z),
    "by __getattr__": (FallsBack, lambda held: held.z, lambda held, value: set_z(held.inner, value)),
    "object.__getattribute__": (Plain, lambda held: object.__getattribute__(held, "z"), set_z),
    "object.__getattribute__, a slot": (Slotted, lambda held: object.__getattribute__(held, "z"), set_z),
    "a slot's descriptor": (Slotted, lambda held: Slotted.z.__get__(held), set_z),
    "a descriptor": (Described, lambda held: Described.__dict__["z"].__get__(held), set_z),
    "getattr_static": (Plain, lambda held: inspect.getattr_static(held, "z"), set_z),
    "the dict's descriptor": (Plain, lambda held: Plain.__dict__["__dict__"].__get__(held)["z"], set_z),
    "__reduce_ex__": (Plain, lambda held: held.__reduce_ex__(2)[2]["z"], set_z),
    "copy": (Plain, lambda held: copy.copy(held).z, set_z),
    "deepcopy": (Plain, lambda held: copy.deepcopy([held])[0].z, set_z),
    "deepcopy, a slot": (Slotted, lambda held: copy.deepcopy(held).z, set_z),
    "deepcopy of a namespace": (space, lambda held: copy.deepcopy(held).z, set_z),
    "pickle": (Plain, lambda held: pickle.loads(pickle.dumps(held)).z, set_z),
    "dataclasses.replace": (Data, lambda held: dataclasses.replace(held).z, set_z),
    "asdict": (Data, lambda held: dataclasses.asdict(held)["z"], set_z),
    "a namespace compared": (space, lambda held: 1.0 + (held == types.SimpleNamespace(z=2.0)), set_z),
    "a namespace in a list": (space, lambda held: 1.0 + (types.SimpleNamespace(z=2.0) in [held]), set_z),
    "a namespace shown": (space, shown, set_z),
    "one of a class of one's own compared": (lambda: Space(z=1.0), lambda held: 1.0 + (held == Space(z=2.0)), set_z),
    "one of a class of one's own shown": (lambda: Space(z=1.0), shown, set_z),
    "an error's arguments": (
        lambda: Failure(1.0),
        lambda held: held.args[0],
        lambda held, value: setattr(held, "args", (value,)),
    ),
    "an error's text": (
        lambda: Failure(1.0),
        lambda held: float(str(held)),
        lambda held, value: setattr(held, "args", (value,)),
    ),
    "a partial function": (
        lambda: functools.partial(lambda z: z, 1.0),
        lambda held: held(),
        lambda held, value: held.__setstate__((held.func, (value,), {}, {})),
    ),
    "a hash": (
        lambda: hashlib.md5(b"0"),
        lambda held: 1.0 + held.digest()[0] / 64,
        lambda held, value: held.update(str(value).encode()),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_reads_that_bypass_attribute_lookup_are_guarded(way, by_kernels):
    make, read, change = WAYS[way]

    def run(backend):
        compiled, held = compiled_linear(backend), make()

        @fl.trace
        def step(x):
            return compiled(x).sum() * read(held)

        return results(step, lambda i: change(held, i - 1.0))

    check(run)


OPTIMIZERS = {
    "how much state": (lambda o, w: len(o.state), lambda o, w, i: o.state.clear()),
    "a name in its state": (lambda o, w: o.state[w].get("tag", 1.0), lambda o, w, i: o.state[w].update(tag=2.0 + i)),
    "a name of nobody's in its state": (lambda o, w: "tag" in o.state, lambda o, w, i: o.state.update(tag={})),
    "its defaults": (lambda o, w: o.defaults["lr"], lambda o, w, i: o.defaults.update(lr=0.1 * i)),
    "a name in a group": (
        lambda o, w: o.param_groups[0].get("tag", 1),
        lambda o, w, i: o.param_groups[0].update(tag=i),
    ),
    "how many groups": (
        lambda o, w: len(o.param_groups),
        lambda o, w, i: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
    ),
    "its rate, shown": (lambda o, w: "lr: 0.1\n" in repr(o), lambda o, w, i: o.param_groups[0].update(lr=0.01 * i)),
    "its state as a dict": (
        lambda o, w: o.state_dict()["param_groups"][0]["weight_decay"],
        lambda o, w, i: o.param_groups[0].update(weight_decay=0.1 * i),
    ),
    "an attribute": (lambda o, w: getattr(o, "scale", 1.0), lambda o, w, i: setattr(o, "scale", i)),
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_reads_of_an_optimizer_are_guarded(what, by_kernels):
    read, change = OPTIMIZERS[what]

    def run(backend):
        compiled = compiled_linear(backend)
        optimizer = torch.optim.SGD(compiled.parameters(), 0.1, momentum=0.9)

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean() * (1.0 + read(optimizer, compiled.weight))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return results(step, lambda i: change(optimizer, compiled.weight, i))

    check(run)


@pytest.mark.parametrize("late", [False, True])
def test_state_without_a_weight_is_kept(late):
    def run(backend):
        compiled = compiled_linear(backend)
        optimizer = torch.optim.SGD(compiled.parameters(), 0.1, momentum=0.9)

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean() * optimizer.state.get("calls", 1)
            loss.backward()
            optimizer.step()
            return loss

        def change(i):
            if i == 2 or not late:
                optimizer.state["calls"] = 3

        return results(step, change)

    check(run)


@pytest.mark.parametrize("method", [False, True])
def test_a_step_can_count_in_its_own_attributes(method, by_kernels):
    def run(backend):
        compiled = compiled_linear(backend)

        def count(x):
            step.calls = getattr(step, "calls", 0) + 1
            step.latest = compiled(x).detach().sum()
            return step.latest * 0 + getattr(step, "scale", 1.0)

        class Holder:
            @fl.trace
            def method(self, x):
                return count(x)

        step = fl.trace(count)
        call = Holder().method if method else step
        results = []
        for i in range(6):
            if i == 3:
                step.scale = 5.0
            elif i == 5:
                del step.scale
            results.append((call(X).item(), step.calls))
        return results

    eager = run(fl.backend("CPU"))
    assert [calls for _, calls in eager] == [1, 2, 3, 4, 5, 6] and len({scale for scale, _ in eager}) == 2
    assert run(fl.backend("XLA")) == eager


THROUGH = {
    "whether it trains": (lambda c: 2.0 if c.training else 1.0, lambda c, i: c.train(i == 5)),
    "an attribute": (lambda c: c.scale, lambda c, i: setattr(c, "scale", float(i))),
    "an attribute of a part": (lambda c: c[0].scale, lambda c, i: setattr(c[0], "scale", float(i))),
    "one that was not there": (lambda c: getattr(c, "late", 1.0), lambda c, i: setattr(c, "late", float(i))),
    "how many parts": (len, lambda c, i: c.append(nn.Identity())),
    "how many weights": (
        lambda c: sum(p.requires_grad for p in c.parameters()),
        lambda c, i: c[0].bias.requires_grad_(i == 5),
    ),
}


@pytest.mark.parametrize("by_model", [False, True])
@pytest.mark.parametrize("what", THROUGH)
def test_reads_through_the_compiled_model_are_guarded(what, by_model, by_kernels):
    read, change = THROUGH[what]

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Sequential(nn.Linear(3, 2))
        model.scale = model[0].scale = 1.0
        compiled = fl.compile(model, backend)

        @fl.trace
        def step(x):
            compiled.calls = getattr(compiled, "calls", 0) + 1
            return compiled(x).sum() * read(compiled)

        results = []
        for i in range(7):
            if i in (3, 5):
                change(model if by_model else compiled, i)
            results += [step(X).item(), model.calls]
        return results

    assert run(fl.backend("XLA")) == pytest.approx(run(fl.backend("CPU")), rel=1e-5)  # float32


def test_numbers_of_our_schedules_are_guarded(by_kernels):
    """They are constants of the step, even if its Python does not read them."""

    def run(backend):
        compiled = compiled_linear(backend)
        optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
        schedule = fl.optim.lr_scheduler.LinearLR(optimizer, 0.1, 0.01, 10)

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            return loss

        def halve(i):
            for name, value in vars(schedule).items():
                if isinstance(value, float):
                    setattr(schedule, name, value * 0.5)

        return results(step, halve)

    check(run)


class Scripted(nn.Module):
    k: float

    def __init__(self):
        super().__init__()
        self.k = 1.0
        self.register_buffer("b", torch.ones(()))

    def forward(self, x):
        return x * self.k + self.b


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_checked_at_each_call(by_kernels):
    """Its attributes are stored in C++."""

    def run(backend):
        scripted, compiled = torch.jit.script(Scripted()), compiled_linear(backend)

        @fl.trace
        def step(x):
            return scripted(compiled(x).sum() * 0)

        def change(i):
            scripted.k = scripted.k + i
            scripted.b = torch.full((), float(i))

        return results(step, change)

    check(run)


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) * 2


WATCHERS = {
    "Doubles": Doubles,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2),
}


@pytest.mark.parametrize("what", WATCHERS)
def test_modes_around_a_step_see_its_operations(what, by_kernels):
    def run(backend, trace):
        compiled = compiled_linear(backend)

        @trace
        def step(x):
            loss = compiled(x).square().sum()
            loss.backward()
            return loss.detach()

        expected = step(X)
        with WATCHERS[what]() as watcher:
            result = step(X)
        with torch.autograd.graph.save_on_cpu():
            assert step(X).item() == expected.item()
        return result, compiled.weight.grad, getattr(watcher, "get_total_flops", lambda: 0)()

    check_runs_eagerly(run, rf"test_attribute_lookup.py:\d+: .*{what}")


def _other_strides(held, i):
    held.t.data = torch.ones(4, 3) if i == 3 else torch.ones(3, 4).t()


FACTS = {
    "strides": (lambda held: held.t.stride(0), _other_strides),
    "contiguity": (lambda held: held.t.is_contiguous(), _other_strides),
    "its seed": (lambda held: torch.initial_seed() % 7, lambda held, i: torch.manual_seed(i)),
}


@pytest.mark.parametrize("fact", FACTS)
def test_metadata_is_guarded(fact, by_kernels):
    read, change = FACTS[fact]

    def run(backend):
        compiled, held = compiled_linear(backend), types.SimpleNamespace(t=torch.ones(3, 4).t())

        @fl.trace
        def step(x):
            return compiled(x).sum() * 0 + read(held)

        return results(step, lambda i: change(held, i))

    check(run)


@pytest.mark.parametrize("make", [space, lambda: Space(z=1.0)])
def test_a_namespace_can_be_set_by_any_method(make, by_kernels):
    """Also while a step is traced; setting an attribute to its current value counts as a read."""

    def run(backend):
        compiled, held = compiled_linear(backend), make()

        @fl.trace
        def step(x):
            object.__setattr__(held, "z", 1.0)
            held.n = 2.0
            return compiled(x).sum()

        results = []
        for i in range(6):
            if i in (3, 5):
                held.z = held.n = 0.0
            step(X)
            results.append((held.z, held.n))
        return results

    assert run(fl.backend("XLA")) == run(fl.backend("CPU")) == [(1.0, 2.0)] * 6


def test_renamed_attributes_of_transformers_configurations_are_guarded(by_kernels):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8)
    compiled = compiled_linear(fl.backend("XLA"))

    @fl.trace
    def step(x):
        return compiled(x).detach() * 0 + config.hidden_size

    results = []
    for i in range(5):
        config.n_embd = 8 + i // 2
        results.append(step(X)[0, 0].item())
    assert results == [8, 8, 9, 9, 10]
