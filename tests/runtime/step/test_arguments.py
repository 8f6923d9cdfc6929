"""Arguments of a traced step: changes of them, and of dicts and lists that contain them, are repeated at each call."""

import array
import collections
import ctypes
import dataclasses
import os
import random
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, TraceError
from firstloss.runtime import jax_support
from tests.compiled_steps import check_runs_eagerly


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.z = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.z(torch.tanh(self.a(x)))


def batch():
    return torch.randn(6, 4)


CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


@case
def edited_in_place(net, model, optimizer):
    @fl.trace
    def step(x):
        x.sub_(0.5).div_(2)
        return net(x).sum()

    for i in range(4):
        x = batch().t().contiguous().t() if i == 2 else torch.randn(8, 4)[1:7] if i == 3 else batch()
        yield step(x), x


@case
def results_as_arguments(net, model, optimizer):
    @fl.trace
    def step(h, x):
        h.mul_(0.5).add_(x.mean(0))
        return net(x).sum(), h

    h = torch.zeros(4)
    for i in range(6):
        loss, same = step(h, batch())
        yield loss, h.clone(), same is h
        if i == 3:
            h = h * 2


@case
def views_that_are_kept(net, model, optimizer):
    kept = []

    @fl.trace
    def step(x):
        kept.extend([x[1], x.t()[1:3], x.detach(), x[::2, None], x.diagonal(), x.expand(2, 6, 4)])
        return net(x).sum()

    for i in range(4):
        x = torch.randn(4, 6).t() if i % 2 else batch()
        yield step(x)
        x.mul_(2)
        yield [view.clone() for view in kept]
        kept[-4].add_(1)
        yield x


@case
def views_of_another_dtype(net, model, optimizer):
    @fl.trace
    def step(x):
        return x.view(torch.int32)[1], x.flatten()[3:5], x.reshape(3, 8)[0]

    for _i in range(4):
        x = batch()
        views = step(x)
        x.mul_(2)
        yield views
    yield step(torch.randn(4, 6).t().contiguous())


@case
def gradients_of_an_argument(net, model, optimizer):
    @fl.trace
    def step(x):
        loss = net(x).sum()
        loss.backward()
        return loss, x.detach() + 0.1 * x.grad.sign()

    for _i in range(4):
        x = batch().requires_grad_()
        yield step(x), x.grad
        optimizer.step()
        optimizer.zero_grad()


@case
def gradients_that_add_up(net, model, optimizer):
    x = batch().requires_grad_()

    @fl.trace
    def step(x):
        loss = (net(x) ** 2).sum()
        loss.backward()
        return loss

    for i in range(6):
        yield step(x), x.grad.clone()
        if i == 3:
            x.grad = None


@case
def wants_gradients_from_now_on(net, model, optimizer):
    @fl.trace
    def step(x):
        x.requires_grad_()
        (g,) = torch.autograd.grad(net(x).sum(), x)
        return g.sum()

    for _i in range(3):
        x = batch()
        yield step(x), x.requires_grad, x.grad


@case
def weights(net, model, optimizer):
    @fl.trace
    def step(weights, x):
        loss = net(x).pow(2).mean()
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in weights))
        with torch.no_grad():
            for p in weights:
                p -= 0.1 * p.grad
        for p in weights:
            p.grad = None
        return loss, norm

    for _i in range(4):
        yield step(list(model.parameters()), batch())
    yield step([model.a.weight], batch())


@case
def one_weight_and_its_view(net, model, optimizer):
    @fl.trace
    def step(w, x):
        loss = net(x).sum() + (w**2).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, w.sum()

    for _i in range(3):
        yield step(model.a.weight, batch())
    for _i in range(3):
        yield step(model.a.weight.detach(), batch())


@case
def of_another_optimizer(net, model, optimizer):
    x = batch().requires_grad_()
    other = torch.optim.SGD([x], lr=0.1)

    @fl.trace
    def step(x):
        loss = net(x).sum()
        loss.backward()
        other.step()
        other.zero_grad()
        return loss

    for _i in range(4):
        yield step(x), x.detach().clone()


@case
def the_same_twice(net, model, optimizer):
    @fl.trace
    def step(x, y):
        return net(x).sum() if x is y else net(y).sum() * 2

    for _i in range(3):
        x = batch()
        yield step(x, x), step(x, x.clone()), step(x, x[:])


@case
def overlapping_and_edited(net, model, optimizer):
    @fl.trace
    def step(x, y):
        x.mul_(2)
        return net(y).sum()

    for _i in range(4):
        x = batch()
        yield step(x, x[:3]), x
        yield step(x, batch()[:3]), x


@case
def overlapping_what_the_step_reads(net, model, optimizer):
    data = batch()

    @fl.trace
    def step(x):
        x.mul_(0.5)
        return net(data).sum()

    for _i in range(3):
        yield step(data[:3]), step(torch.randn(3, 4)), data.clone()


@case
def with_attributes_and_hooks(net, model, optimizer):
    @fl.trace
    def step(x):
        loss = net(x).sum() * getattr(x, "weight", 1.0)
        if x.requires_grad:
            loss.backward()
        return loss

    for i in range(4):
        x = batch()
        if i:
            x.weight = float(i)
        if i == 3:
            x.requires_grad_().register_hook(lambda g: g * 2)
        yield step(x), x.grad


@case
def gives_attributes(net, model, optimizer):
    @fl.trace
    def step(x):
        x.seen = net(x).sum()
        return x.seen * 2

    for _i in range(3):
        x = batch()
        yield step(x), x.seen


@case
def dicts_that_grow(net, model, optimizer):
    @fl.trace
    def step(batch):
        batch["out"] = net(batch["x"])
        batch["all"].append(batch["out"].sum())
        del batch["unused"]
        return batch

    for _i in range(4):
        batch_dict = {"x": batch(), "all": [], "unused": torch.ones(2)}
        yield step(batch_dict) is batch_dict, batch_dict


@case
def state_in_a_dict(net, model, optimizer):
    state = {"ema": torch.zeros(3), "n": torch.zeros(()), "best": None}

    @fl.trace
    def step(state, x):
        out = net(x)
        state["ema"] = 0.9 * state["ema"] + 0.1 * out.mean(0)
        state["n"] += 1
        state["best"] = out.max() if state["best"] is None else torch.maximum(state["best"], out.max())
        return out.sum()

    for _i in range(5):
        yield step(state, batch()), dict(state)


@case
def state_in_a_list(net, model, optimizer):
    h = [torch.zeros(3)]

    @fl.trace
    def step(h, x):
        h[0] = h[0] * 0.5 + net(x).mean(0)
        return h[0].sum()

    for _i in range(4):
        yield step(h, batch()), h[0]


@case
def numbers_in_a_dict(net, model, optimizer):
    state = {"n": 0, "sum": torch.zeros(())}

    @fl.trace
    def step(x, state):
        state["n"] += 1
        state["sum"] = state["sum"] + net(x).sum() * state["n"]
        return state["sum"]

    for _i in range(4):
        yield step(batch(), state), state["n"]


@case
def dicts_of_other_kinds(net, model, optimizer):
    @fl.trace
    def step(batch_dict):
        batch_dict["x"] = batch_dict["x"] * 2
        batch_dict["y"] = net(batch_dict["x"])
        return batch_dict["y"].sum()

    for kind in (dict, collections.OrderedDict, collections.UserDict):
        for _i in range(3):
            batch_dict = kind(x=batch())
            yield step(batch_dict), batch_dict["x"], batch_dict["y"], len(batch_dict)


@case
def one_dict_twice(net, model, optimizer):
    @fl.trace
    def step(a, b):
        a["y"] = net(a["x"]).sum()
        b["z"] = a["y"] * 2 if a is b else a["y"]
        return b["z"]

    for _ in range(3):
        batch_dict, other = {"x": batch()}, {"x": batch()}
        yield step(batch_dict, batch_dict), batch_dict["z"], step(batch_dict, other), other["z"], len(batch_dict)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    out: torch.Tensor | None = None


@case
def objects(net, model, optimizer):
    @fl.trace
    def step(batch_dict):
        batch_dict.out = net(batch_dict.x).mean(0)
        return batch_dict.out.sum()

    batch_dict = Batch(batch())
    for i in range(4):
        yield step(batch_dict), batch_dict.out
        if i == 1:
            batch_dict = Batch(batch())


class Plain:
    def __init__(self, x):
        self.x, self.name, self.count = x, "plain", 3


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Attributes(dict):
    __getattr__ = dict.__getitem__

    def __setattr__(self, name, value):
        self[name] = value

    def __init__(self, x):
        super().__init__(x=x)


class Ordered(collections.OrderedDict):
    x = property(lambda self: self["x"])

    def __init__(self, x):
        super().__init__(x=x)


class Scaled(list):
    x = property(lambda self: self[0] * self.scale)

    def __init__(self, x):
        super().__init__([x])
        self.scale = 2.0


class Graph:
    """As PyTorch Geometric's batches: what it holds refers to it."""

    x = property(lambda self: self.store.values["x"] * self.store.graph().factor)

    def __init__(self, x):
        self.factor, self.store = 0.5, Store(self, x)


class Store:
    def __init__(self, graph, x):
        self.graph, self.values, self.kind = weakref.ref(graph), {"x": x}, Graph


def named(x):
    return types.SimpleNamespace(x=x, scale=2.0)


CLASSES = (Plain, Slotted, Attributes, Ordered, Scaled, Graph, named)


@case
def batches_of_any_class(net, model, optimizer):
    @fl.trace
    def step(batch):
        return net(batch.x).sum()

    for kind in CLASSES:
        for _ in range(3):
            yield step(kind(batch()))


@case
def batches_that_the_step_changes(net, model, optimizer):
    @fl.trace
    def step(batch):
        batch.out = net(batch.x).mean(0)
        batch.out2 = [batch.out * 2]
        if isinstance(batch, Plain):
            batch.count += 1
        return batch.out.sum()

    for kind in (Plain, Attributes, Graph):
        for _ in range(3):
            held = kind(batch())
            yield step(held), held.out, held.out2[0], getattr(held, "count", 0) if kind is Plain else 0


class Judge:
    """Has a method with the name of one of ours."""

    def __init__(self, score):
        self.score = score

    def refuse(self):
        raise AssertionError("nobody asked")


@case
def objects_that_are_kept(net, model, optimizer):
    kept = []

    @fl.trace
    def step(x):
        kept.append(Judge(net(x).sum().detach()))
        return kept[-1].score * 2

    for _ in range(3):
        yield step(batch()), kept[-1].score, len(kept)


@case
def tensors_as_keys(net, model, optimizer):
    values, seen = {}, set()

    @fl.trace
    def step(x):
        loss = net(x).sum().detach()
        values[loss] = 1
        seen.add(loss)
        return loss

    for _ in range(4):
        loss = step(batch())
        yield loss, len(values), len(seen), loss in seen, list(values)[-1] is loss


@case
def kept_dicts_and_lists(net, model, optimizer):
    class Kept:
        last = None
        all: list = []

    Kept.all = []

    @fl.trace
    def step(batch_dict, pair):
        Kept.last = batch_dict
        Kept.all.append(pair)
        return net(batch_dict["x"]).sum() + pair[0].sum()

    for _i in range(4):
        batch_dict, pair = {"x": batch()}, [batch(), batch()]
        yield step(batch_dict, pair), Kept.last is batch_dict, Kept.all[-1] is pair, len(Kept.all)


@case
def more_by_position_and_by_name(net, model, optimizer):
    @fl.trace
    def step(x, *rest, **more):
        more["x"] = x + 1
        rest[0].add_(1)
        return net(more["x"]).sum() + len(rest)

    for _i in range(3):
        other = torch.zeros(2)
        yield step(batch(), other, 2, third=3), other


def run(name, f, tmp_path):
    backend = fl.backend(name, **({} if name == "CPU" else {"artifact_dir": tmp_path}))
    torch.manual_seed(0)
    model = Net()
    net = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for value in f(net, model, optimizer):
        results.append(torch.utils._pytree.tree_map(plain, value))
    return [*results, [plain(p) for p in model.parameters()]]


def plain(value):
    if isinstance(value, torch.Tensor):
        return value.detach().clone().double()
    return plain_dict(value) if isinstance(value, collections.UserDict) else value


def plain_dict(value):
    return {key: plain(part) for key, part in value.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_argument_updates_match_eager(name, tmp_path):
    expected, actual = run("CPU", CASES[name], tmp_path), run("XLA", CASES[name], tmp_path)
    # XLA sums in another order than PyTorch.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_gradients_that_leave_the_step_match_eager():
    def run(backend, trace):
        torch.manual_seed(0)
        net, before = fl.compile(Net(), backend), nn.Linear(4, 4)

        @trace
        def step(x):
            net(x).sum().backward()

        for _ in range(2):
            step(before(batch()))
        return before.weight.grad

    check_runs_eagerly(run, r"test_arguments.py:\d+.*outside of the step")


def test_editing_a_padded_argument_is_refused(backend):
    net = fl.compile(Net(), backend)

    @fl.trace(shapes=fl.Pad())
    def step(x):
        x.mul_(2)
        return net(x).sum()

    x = batch()
    before = x.clone()
    step(x)
    assert torch.equal(x, before * 2)
    with pytest.raises(fl.errors.TraceError, match="padded copy"):
        step(batch()[:3])


@pytest.mark.parametrize("kind", CLASSES)
def test_batches_of_a_class_are_compiled_once(kind, backend):
    net = fl.compile(Net(), backend)

    @fl.trace
    def step(batch):
        return net(batch.x).sum()

    with warnings.catch_warnings():
        warnings.simplefilter("error", fl.errors.GraphChangeWarning)
        warnings.simplefilter("error", fl.errors.EagerStepWarning)
        held = [kind(batch()) for _ in range(3)]
        for one in held:
            step(one)
    assert len(step._cache.steps()) == 1


class Owner:
    """Not data: it holds a model."""

    def __init__(self, net):
        self.net, self.total = net, torch.zeros(())


def test_an_object_that_is_not_data_stays_itself(backend):
    owner = Owner(fl.compile(Net(), backend))

    @fl.trace
    def step(owner, x):
        owner.total = owner.total + owner.net(x).sum().detach()
        return owner.total, owner

    x = batch()
    for _ in range(3):
        total, returned = step(owner, x)
        assert returned is owner and torch.equal(total, owner.total)


def test_arguments_are_not_kept_alive(backend):
    import gc

    net = fl.compile(Net(), backend)

    @fl.trace
    def step(batch_dict):
        return net(batch_dict["x"]).sum()

    x = batch()
    step({"x": x}), step({"x": x})
    reference = weakref.ref(x)
    del x
    gc.collect()
    assert reference() is None


def test_new_argument_values_do_not_retrace(backend, traced):
    net = fl.compile(Net(), backend)

    @fl.trace
    def step(batch_dict, h):
        h.mul_(0.5)
        batch_dict["y"] = net(batch_dict["x"])
        return batch_dict["y"].sum()

    h = torch.ones(3)
    for _ in range(6):
        step({"x": batch()}, h)
        h = h + 1
    assert len(traced) <= 2


def test_a_step_traced_twice_edits_arrays_once(backend):
    """An argument turns out to be part of another, and the step is traced again in the same call."""

    def program(backend):
        torch.manual_seed(0)
        model = fl.compile(nn.Linear(4, 3), backend)
        plain, columns, octets, numbers = np.zeros(3), np.zeros((3, 2), order="F"), bytearray(2), array.array("d", [0])
        words, draws = (ctypes.c_int * 2)(), random.Random(0)
        normals, old = np.random.default_rng(0), np.random.RandomState(0)
        os.environ["FIRSTLOSS_TEST_COUNT"] = "0"
        random.seed(0), np.random.seed(0)

        @fl.trace
        def step(x, y, h):
            plain[0] += 1
            columns[1, 1] += 1
            octets[0] += 1
            numbers[0] += 1
            words[1] += 1
            os.environ["FIRSTLOSS_TEST_COUNT"] = str(int(os.environ["FIRSTLOSS_TEST_COUNT"]) + 1)
            drawn = draws.random() + normals.random() + old.rand() + random.random() + np.random.rand()
            loss = (model(x) - y).square().mean() * drawn
            h.mul_(0.5)
            y.t()[1].zero_()
            return loss

        h = torch.zeros(6)
        for i in range(5):
            y = torch.randn(6, 3)
            yield step(torch.randn(6, 4), y, y[:, 0] if i == 3 else h).detach().clone()
            counted = int(os.environ["FIRSTLOSS_TEST_COUNT"])
            yield torch.tensor([plain[0], columns[1, 1], octets[0], numbers[0], words[1], counted])
        del os.environ["FIRSTLOSS_TEST_COUNT"]

    expected = list(program(fl.backend("CPU")))
    actual = list(program(fl.backend(backend)))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # XLA sums in another order


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, 1),
    "channels_last": lambda x: x.reshape(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(2, 3, 4).permute(2, 0, 1),
    "a row": lambda x: x[:1].transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_arguments_keep_their_strides(layout):
    """The step may read them; another layout is another graph. (A step's results are contiguous.)"""

    @fl.trace
    def step(x):
        return x * 2.0 if x.is_contiguous() else x * 3.0, x.stride()

    def run(backend):
        actual = []
        for make in (lambda x: x.clone(), LAYOUTS[layout], lambda x: x.clone(), LAYOUTS[layout]):
            actual.append(step(make(torch.arange(24.0).reshape(6, 4))))
        return actual

    for (x, stride), (y, expected) in zip(run(fl.backend("XLA")), run(fl.backend("CPU")), strict=True):
        assert torch.equal(x, y) and stride == expected


def test_strides_of_each_argument_are_guarded():
    @fl.trace
    def step(x, y):
        return torch.stack(
            [x.sum() * (2.0 if x.is_contiguous() else 3.0), y.sum() * (5.0 if y.is_contiguous() else 7.0)]
        )

    def run(backend):
        a = torch.arange(9.0).reshape(3, 3)
        pairs = [*[(a.t(), a.clone())] * 3, (a, a.clone().t()), (a.t(), a.clone().t())]
        return [step(x, y).tolist() for x, y in pairs]

    assert run(fl.backend("XLA")) == run(fl.backend("CPU"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_to_strided_arguments_match_eager(layout):
    @fl.trace
    def step(x):
        x.mul_(2.0)
        x[0] = 1.0
        return x.sum()

    def run(backend):
        x = LAYOUTS[layout](torch.arange(24.0).reshape(6, 4))
        return [step(x).item() for _ in range(3)], x

    (sums, x), (expected, y) = run(fl.backend("XLA")), run(fl.backend("CPU"))
    assert sums == expected and torch.equal(x, y) and x.stride() == y.stride()


def test_padding_values_are_given_by_the_names_of_positional_parameters(backend):
    @fl.trace(shapes=fl.Pad(values={"y": -100}))
    def step(x, y):
        return torch.nn.functional.cross_entropy(x, y, ignore_index=-100)

    for rows in (8, 5, 3):
        x, y = torch.randn(rows, 4), torch.arange(rows) % 4
        expected = torch.nn.functional.cross_entropy(x, y)
        torch.testing.assert_close(step(x, y), expected, rtol=1e-5, atol=1e-6)  # a mean in another order


def test_a_padding_value_for_an_unknown_name_is_an_error(backend):
    @fl.trace(shapes=fl.Pad(values={"labels": -100}))
    def step(x, y):
        return x.sum() + y.sum()

    with pytest.raises(fl.errors.ShapeError, match="'labels'.*no tensor of that name.*'x', 'y'"):
        step(torch.ones(2), torch.ones(2))


class Labels(set):
    """What a compiled step cannot take apart."""


GIVEN = {
    "arrays": lambda rng: (rng.standard_normal((5, 4)).astype(np.float32), rng.integers(0, 3, 5)),
    "arrays in a dict": lambda rng: ({"x": rng.standard_normal((5, 4)), "y": rng.integers(0, 3, 5)},),
    "another object": lambda rng: (rng.standard_normal((5, 4)), Labels(rng.integers(0, 3, 5).tolist())),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_a_step_may_be_given_anything(kind, tmp_path):
    """As a replay buffer gives NumPy arrays: its Python then runs at each call, with a warning that says so."""

    def losses(name):
        options = {"artifact_dir": tmp_path} if name == "XLA" else {}
        backend = fl.backend(name, **options)
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 3)
        compiled, optimizer = fl.compile(model, backend), torch.optim.Adam(model.parameters(), lr=0.1)

        @fl.trace
        def step(x, y=None):
            x, y = (x["x"], x["y"]) if y is None else (x, y)
            y = torch.as_tensor([max(y)] * 5) if isinstance(y, Labels) else torch.from_numpy(y)
            loss = nn.functional.cross_entropy(compiled(torch.as_tensor(x, dtype=torch.float32)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        rng = np.random.default_rng(0)
        found = [step(*GIVEN[kind](rng)).item() for _ in range(4)]
        return found, step, GIVEN[kind](rng)

    expected, *_ = losses("CPU")
    with pytest.warns(EagerStepWarning, match=r"test_arguments\.py:\d+: .*type (ndarray|Labels)") as caught:
        found, step, another = losses("XLA")
    assert found == expected and len([w for w in caught if w.category is EagerStepWarning]) == 1
    refusing = fl.trace(step._step, reads="refuse")
    with pytest.raises(TraceError, match="torch.from_numpy"):
        refusing(*another)


def test_a_class_of_batches_can_be_registered_with_pytorch_later(backend):
    """Its users' own functions then take it apart."""

    class Batch:
        def __init__(self, x):
            self.x, self.made = x, "by the constructor"

    step = fl.trace(lambda batch: (batch.x.sum(), batch.made))
    assert step(Batch(torch.ones(3)))[1] == "by the constructor"
    torch.utils._pytree.register_pytree_node(Batch, lambda batch: ([batch.x], None), lambda xs, _: Batch(*xs))
    total, made = step(Batch(torch.ones(3)))
    assert total.item() == 3 and made == "by the constructor"


DATA = {
    "whole": lambda data: data,
    "a part": lambda data: data[1:],
    "not aligned": lambda data: data.flatten()[3:],
    "transposed": lambda data: data.t(),
    "expanded": lambda data: data[:1].expand(700, -1),
    "bfloat16": lambda data: data.to(torch.bfloat16),
    "integers": lambda data: (data * 100).long(),
    "small": lambda data: data[:9, :8].clone(),
}


@pytest.mark.parametrize("name", DATA)
def test_a_data_set_that_is_no_argument_may_change_between_calls(name, tmp_path):
    """A large one is not copied at each call: it is read where it is, before the call returns."""

    def run(backend):
        torch.manual_seed(0)
        whole = torch.randn(700, 800)
        data = DATA[name](whole)
        with backend.device:
            model = fl.compile(nn.Linear(4, 1), backend)

        @fl.trace
        def step(n):
            rows = data.index_select(0, n).float().flatten()
            return model(rows[:4]).sum() + data.double().sum()

        losses = []
        for n in range(6):
            losses.append(step(torch.tensor([n, n + 1, n + 2, n + 3])))
            whole.mul_(1.1)
            data = data if data._base is not None else data * 2 if n == 3 else data.mul_(2)
        return torch.stack([loss.detach().cpu() for loss in losses])

    expected = run(fl.backend("CPU"))
    torch.testing.assert_close(run(fl.backend("XLA", artifact_dir=tmp_path)), expected, rtol=1e-5, atol=1e-5)


def test_a_large_data_set_is_not_copied(tmp_path, monkeypatch):
    data, given = torch.randn(700, 800), []
    original = jax_support.share_memory
    monkeypatch.setattr(jax_support, "share_memory", lambda tensor: given.append(original(tensor)) or given[-1])
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = fl.compile(nn.Linear(800, 1), backend)
    step = fl.trace(lambda n: model(data[n]).sum())
    for n in range(4):
        step(torch.tensor([n])).item()
        shared = [array for array in given if array.shape == data.shape]
        given.clear()
    assert [array.unsafe_buffer_pointer() for array in shared] == [data.data_ptr()]
