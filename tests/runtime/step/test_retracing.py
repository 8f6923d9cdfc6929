"""Changes of the state that a step's Python reads are detected, and give eager PyTorch's result or an error."""

import codecs
import copy
import inspect
import io
import logging
import random
import re
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangedError, GraphChangeWarning, ShapeError
from firstloss.runtime.step import cache_entry, compiling, tracing
from tests import compiled_steps
from tests.compiled_steps import check_runs_eagerly

X = torch.tensor([1.0, 2.0])
counter = 0
scale = 1.0
table = [1.0]
outside = torch.zeros(())


def line_of(function, text):
    """The location, as "file:line", of the line of `function` that contains `text`."""
    lines, begin = inspect.getsourcelines(function)
    return f"{__file__}:{next(begin + i for i, line in enumerate(lines) if text in line)}"


def values(step, *arguments, count=1):
    return [step(*arguments).clone().tolist() for _ in range(count)]


def quiet(step, *arguments, count=1):
    """Like `values`, without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        return values(step, *arguments, count=count)


def traces(step):
    """The number of distinct compiled steps."""
    return compiled_steps.compilations(step)


@pytest.fixture(autouse=True)
def _reset(backend):
    global counter, scale, outside
    counter, scale, outside = 0, 1.0, torch.zeros(())
    table[:] = [1.0]


# -- the reference's own examples
# ---------------------------------------------------------------------------------------


def bad_function(input1: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
    global counter  # regular python int. global is bad for other reasons, but ignore that
    counter += 1
    if counter < 4:
        return input1
    else:
        return input2


def better_function(input1: torch.Tensor, input2: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    step += 1
    output = torch.where(step < 4, input1, input2)
    return output


def test_a_counter_in_a_branch_is_not_frozen():
    step = fl.trace(lambda x: bad_function(x * 2, x * 3))
    with pytest.warns(GraphChangeWarning) as record:
        assert values(step, X, count=6) == [[2.0, 4.0]] * 3 + [[3.0, 6.0]] * 3
    (text,) = [str(w.message) for w in record]
    assert "the global counter" in text and "(True, now False)" in text  # of the comparison
    assert line_of(bad_function, "if counter < 4") in text  # the line that reads it
    assert line_of(bad_function, "counter += 1") in text
    assert "torch.where" in text and "recompiled" in text
    assert counter == 6 and traces(step) == 2


def test_a_changed_graph_can_be_refused():
    step = fl.trace(lambda x: bad_function(x * 2, x * 3), changes="refuse")
    assert quiet(step, X, count=3) == [[2.0, 4.0]] * 3
    with pytest.raises(GraphChangedError, match=r"the global counter .*True, now False.*torch.where"):
        step(X)


def test_a_tensor_counter_is_traced_once():
    number = torch.zeros((), dtype=torch.int64)
    step = fl.trace(lambda x: better_function(x * 2, x * 3, number))
    assert quiet(step, X, count=6) == [[2.0, 4.0]] * 3 + [[3.0, 6.0]] * 3
    assert number.item() == 6 and traces(step) == 1


# -- places where Python stores what a step reads
# -----------------------------------------------------------------------


class Settings:
    def __init__(self):
        self.factor = 1.0
        self.nested = {"flag": False}


class Layer(nn.Module):
    """Reads a number from each kind of place."""

    default = 1.0

    def __init__(self):
        super().__init__()
        self.own = 1.0
        self.settings = Settings()
        self.numbers = [1.0]
        self.function = torch.sin
        self.register_buffer("table", torch.ones(()))
        self.child = nn.Identity()

    def forward(self, x):
        x = self.child(self.function(x) * self.own * self.default * self.settings.factor * self.numbers[0])
        return -x if self.settings.nested["flag"] else x * self.helper() * self.table

    def helper(self):
        return scale * table[0]


def _set(name, value):
    return lambda layer: setattr(layer, name, value)


EDITS = {
    "attribute": _set("own", 2.0),
    "attribute of another object": lambda layer: setattr(layer.settings, "factor", 3.0),
    "another object": _set("settings", type("Other", (), {"factor": 4.0, "nested": {"flag": False}})()),
    "in a dict of another object": lambda layer: layer.settings.nested.update(flag=True),
    "in a list": lambda layer: layer.numbers.__setitem__(0, 5.0),
    "class attribute": lambda layer: setattr(Layer, "default", 6.0),
    "function": _set("function", torch.cos),
    "global": lambda layer: globals().update(scale=7.0),
    "list in a global": lambda layer: table.__setitem__(0, 8.0),
    "another buffer": _set("table", torch.full((), 9.0)),
    "another submodule": _set("child", nn.Softmax(-1)),
    "a method of the class": lambda layer: setattr(Layer, "helper", lambda self: 10.0),
}


# The same computation with other inputs
REPLACED = ("attribute", "attribute of another object", "in a list", "global", "list in a global", "another buffer",
            "class attribute")  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("after", [1, 3])
def test_outside_changes_apply_from_the_next_call(edit, after, backend, monkeypatch):
    monkeypatch.setattr(Layer, "default", 1.0)
    monkeypatch.setattr(Layer, "helper", Layer.helper)
    layer = Layer()
    compiled = fl.compile(layer, backend)
    step = fl.trace(lambda x: compiled(x))
    before = quiet(step, X, count=after)
    # One product and a sum of a few numbers, in another order, here and below. Measured: 1.1e-7.
    torch.testing.assert_close(torch.tensor(before[0]), layer(X).clone(), rtol=1.3e-6, atol=0)
    EDITS[edit](layer)
    expected = layer(X).clone()
    assert not torch.allclose(expected, torch.tensor(before[0]))
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        actual = values(step, X, count=3)
    assert actual[0] == actual[1] == actual[2]
    torch.testing.assert_close(torch.tensor(actual[0]), expected, rtol=1.3e-6, atol=0)
    assert len([w for w in record if w.category is GraphChangeWarning]) == (edit not in REPLACED)


def test_closure_variables_are_guarded():
    factor = 1.0

    @fl.trace
    def step(x):
        return x * factor

    assert quiet(step, X) == [[1.0, 2.0]]
    for factor in (2.0, 3.0, 4.0):
        assert quiet(step, X) == [[factor, 2 * factor]]
    assert traces(step) == 2


def test_pytorchs_modes_around_the_call_are_guarded(backend):
    weight = nn.Parameter(torch.ones(2))
    step = fl.trace(lambda x: (weight * x + torch.full((), 1 / 3), torch.is_grad_enabled()))

    def called():
        value, grad = step(X)
        return value.dtype, value.tolist(), grad

    def expected():
        value = (weight * X + torch.full((), 1 / 3)).detach()
        return value.dtype, value.tolist(), torch.is_grad_enabled()

    for _ in range(3):
        assert called() == expected()
        with torch.no_grad():
            assert called() == expected()
        with torch.inference_mode():
            assert called() == expected()
        torch.set_default_dtype(torch.float64)
        try:
            assert called() == expected()
        finally:
            torch.set_default_dtype(torch.float32)
    assert compiled_steps.kinds(step) == 4


def test_training_and_evaluation_in_any_order_are_each_compiled_once(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(1.0))
    compiled = fl.compile(model, backend)
    step = fl.trace(lambda x: compiled(x))
    x = torch.randn(4, 2)
    for mode in (False, True, False, True, True, False):
        model.train(mode)
        (out,) = quiet(step, x)
        assert (torch.tensor(out) == 0).all().item() == mode
    assert traces(step) == 2


@pytest.mark.parametrize("cleared", ["before", "after"])
def test_several_models_are_each_compiled_once(backend, cleared, monkeypatch):
    """Whichever is created or trained in between, and whether or not the others have gradients by then."""
    traced, compiled = [], []
    trace, compile_ = tracing.trace_step, compiling.compile_step
    monkeypatch.setattr(tracing, "trace_step", lambda *a, **k: traced.append(1) or trace(*a, **k))
    monkeypatch.setattr(compiling, "compile_step", lambda *a: compiled.append(1) or compile_(*a))

    def pair():
        net = nn.Linear(2, 2)
        reference = copy.deepcopy(net)
        return (
            *steps(fl.compile(net, backend), net, fl.trace(check=False)),
            *steps(reference, reference, lambda step: step),
        )

    def steps(forward, model, trace):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x):
            if cleared == "before":
                optimizer.zero_grad()
            loss = forward(x).square().sum()
            loss.backward()
            optimizer.step()
            if cleared == "after":
                optimizer.zero_grad()
            return loss.detach()

        def evaluate(x):
            with torch.no_grad():
                return forward(x).square().sum()

        return trace(train), trace(evaluate)

    def run(train, evaluate, train_eagerly, evaluate_eagerly):
        before = len(traced), len(compiled)
        for net, eager in ((train, train_eagerly), (evaluate, evaluate_eagerly)):
            # Two small sums, in another order. Measured: 2.4e-7.
            torch.testing.assert_close(torch.tensor(quiet(net, X)[0]), eager(X), rtol=1.3e-6, atol=2.4e-6)
        return len(traced) - before[0], len(compiled) - before[1]

    first = pair()
    again = (1 if cleared == "before" else 0, 0)  # gradients exist by now; the same Program: not compiled
    assert run(*first) == (2, 2)
    assert run(*first) == again
    second = pair()
    assert run(*first) == (0, 0)
    assert run(*second) == (2, 2)
    assert run(*second) == again
    for steps_of_one in (first, second, second, first):
        assert run(*steps_of_one) == (0, 0)


def test_a_model_can_be_read_before_it_is_compiled(backend):
    teacher, student = nn.Linear(2, 2), nn.Linear(2, 2)
    reference, by = copy.deepcopy(teacher), copy.deepcopy(student)
    compiled = fl.compile(student, backend)
    step = fl.trace(lambda x: (compiled(x) - teacher(x)).square().sum())

    def expected():
        return (by(X) - reference(X)).square().sum().item()

    assert values(step, X, count=3) == pytest.approx([expected()] * 3)
    fl.compile(teacher, backend)
    for _ in range(2):
        with torch.no_grad():
            for parameter in (*teacher.parameters(), *reference.parameters()):
                parameter.mul_(3)
        assert values(step, X)[0] == pytest.approx(expected())


@pytest.mark.parametrize("by", ["module", "optimizer"])
def test_a_model_can_be_compiled_after_the_step_cleared_its_gradients(backend, by):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters())
    compiled = fl.compile(model, backend)

    def by_module(x):
        other.zero_grad()
        return compiled(x).sum()

    def by_optimizer(x):
        optimizer.zero_grad()
        return compiled(x).sum()

    step = fl.trace(by_module if by == "module" else by_optimizer)
    values(step, X, count=3)
    fl.compile(other, backend)
    for _ in range(3):
        other(X).sum().backward()
        assert other.weight.grad is not None
        values(step, X)
        assert other.weight.grad is None


def test_freezing_a_weight_makes_another_step(backend):
    """Also if another model was created before it."""
    model = nn.Linear(2, 2)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        loss = compiled(x).sum()
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        return [torch.zeros(()) if g is None else g.sum() for g in grads]

    expected = [6.0, 2.0]  # of the weight: x, twice; of the bias: one, twice
    assert [g.item() for g in step(X)] == expected
    fl.compile(nn.Linear(2, 2), backend)
    assert [g.item() for g in step(X)] == expected
    model.bias.requires_grad_(False)
    assert [g.item() for g in step(X)] == [6.0, 0.0]
    model.bias.requires_grad_(True)
    assert [g.item() for g in step(X)] == expected


# -- changes that do not matter
# -----------------------------------------------------------------------------------------


def test_a_counter_that_decides_nothing_does_not_retrace(backend, traced):
    calls, log = 0, []

    class Counting(nn.Module):
        count = 0

        def forward(self, x):
            self.count += 1
            return x

    model = Counting()

    @fl.trace(check=False)
    def step(x):
        nonlocal calls
        calls += 1
        log.append(x.shape)
        return model(x)

    quiet(step, X, count=5)
    # The first call finds `count` in the class, and creates an instance attribute, which the second one finds; from the
    # third on it is an input. So is `calls`, from the second one on. Another trace proves each of them.
    assert len(traced) == 5
    assert calls == len(log) == model.count == 5


def test_a_number_created_by_the_first_step_settles(backend, traced):
    class Lazy(nn.Module):
        size = None

        def forward(self, x):
            if self.size is None:
                self.size = len(x)
            return x * self.size

    model = Lazy()

    @fl.trace(check=False)
    def step(x):
        return model(x)

    assert quiet(step, X, count=5) == [[2.0, 4.0]] * 5
    assert len(traced) == 2


# -- tensors that are rebound --------------------------------------------------------------------------------------


class Rebinding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.previous = torch.zeros(())
        self.current = torch.ones(())
        self.made = None

    def forward(self, x):
        self.count = self.count + 1
        self.previous, self.current = self.current, self.previous + self.current
        self.made = x.sum()
        return self.current * 1


def test_an_attribute_rebound_to_a_tensor_is_state(backend):
    model, reference = Rebinding(), Rebinding()
    compiled = fl.compile(model, backend)
    step = fl.trace(lambda x: compiled(x))
    for i in range(8):
        assert step(X + i).item() == reference(X + i).item()
        for name in ("count", "previous", "current", "made"):
            assert getattr(model, name).item() == getattr(reference, name).item(), (i, name)
    assert traces(step) == 1


def test_a_global_rebound_to_a_tensor_is_state():
    inner = torch.zeros(())

    @fl.trace
    def step(x):
        global outside
        nonlocal inner
        outside = outside + 1
        inner = outside + inner
        return inner * x

    assert values(step, X, count=4) == [[n, 2 * n] for n in (1.0, 3.0, 6.0, 10.0)]
    assert outside.item() == 4 and inner.item() == 10


class Mean:
    """A metric that is not a module, and rebinds its sums at each update."""

    def __init__(self):
        self.total = torch.zeros(())
        self.counts = {"rows": torch.zeros((), dtype=torch.int64)}
        self.latest = [torch.zeros(2), None]

    def update(self, x):
        self.total += x.sum()
        self.counts["rows"] = self.counts["rows"] + len(x)
        self.latest[0] = self.latest[0] * 0.5 + x

    def values(self):
        return self.total.item(), self.counts["rows"].item(), self.latest[0].tolist()


def test_sums_of_a_metric_are_state():
    traced, eager = Mean(), Mean()
    step = fl.trace(lambda x: traced.update(x))
    for i in range(4):
        step(X + i)
        eager.update(X + i)
        assert traced.values() == eager.values()
    assert traces(step) == 1


def test_a_growing_tensor_is_retraced(backend):
    class Growing(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = torch.zeros(0)

        def forward(self, x):
            self.cache = torch.cat([self.cache, x])
            return self.cache.sum()

    model = Growing()
    step = fl.trace(lambda x: model(x))
    with pytest.warns(GraphChangeWarning):
        assert [step(X).item() for _ in range(3)] == [3.0, 6.0, 9.0]
    assert model.cache.tolist() == [1.0, 2.0] * 3


# -- reads that cannot be guarded
# ---------------------------------------------------------------------------------------


def test_an_open_file_that_the_step_holds_is_read_at_each_call():
    numbers = io.StringIO("1\n2\n3\n4\n")
    step = fl.trace(lambda x: x * float(next(numbers)))
    with pytest.warns(EagerStepWarning, match="traced at each call.*it consumes or changes a StringIO"):
        assert values(step, X, count=4) == [[n, 2 * n] for n in (1.0, 2.0, 3.0, 4.0)]


def test_what_others_append_to_a_file_in_memory_is_no_change(traced):
    log = io.StringIO()
    step = fl.trace(lambda x: x if log is None else 2 * x)
    for _ in range(6):
        assert step(X).tolist() == [2.0, 4.0]
        log.write("a line\n")
    assert len(traced) == 2  # and one for the verification


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
def test_what_others_write_to_a_file_in_memory_is_read_at_each_call():
    held = io.StringIO("2")
    held.seek(0, io.SEEK_END)
    step = fl.trace(lambda x: x * float(held.getvalue()))
    assert values(step, X, count=4) == [[2.0, 4.0]] * 4
    held.seek(0)
    held.write("3")
    assert values(step, X, count=4) == [[3.0, 6.0]] * 4


def test_a_file_read_is_found_at_the_second_call(tmp_path):
    file = tmp_path / "number"
    file.write_text("1")
    step = fl.trace(lambda x: x * float(file.read_text()))
    assert quiet(step, X) == [[1.0, 2.0]]
    file.write_text("2")
    with pytest.warns((GraphChangeWarning, EagerStepWarning)) as record:
        assert step(X).tolist() == [2.0, 4.0]
    texts = [str(warning.message) for warning in record]
    assert re.search(r"aten.mul.* before, aten.mul.* now.*torch.where", texts[0], re.DOTALL)
    assert re.search(r"traced at each call.*test_retracing.py:\d+ calls (os\.|open|TextIO)", texts[1], re.DOTALL)


def reads_the_clock():
    return lambda x: x * min(1.0, time.monotonic())


def counts_and_branches():
    state = {"calls": 0}

    def step(x):
        state["calls"] += 1
        state["parts"] = [state["calls"]]
        return x * (2 if state["parts"][0] % 2 else 3)

    return step


def advances_an_iterator():
    numbers = io.StringIO("1\n" * 99)
    return lambda x: x * float(next(numbers))


@pytest.mark.parametrize("options", [{}, {"check": "always"}, {"changes": "refuse"}], ids=str)
@pytest.mark.parametrize("make", [reads_the_clock, counts_and_branches, advances_an_iterator])
@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning", "ignore::firstloss.errors.GraphChangeWarning")
def test_a_step_to_be_traced_at_each_call_is_run_instead(make, options, traced):
    """Unless a change must not go unnoticed: where its weights are on this host, that is faster."""
    calls = 32
    step, eager = fl.trace(make(), **options), make()
    if options == {"changes": "refuse"} and make is counts_and_branches:
        with pytest.raises(GraphChangedError):
            values(step, X, count=calls)
        return
    assert values(step, X, count=calls) == values(eager, X, count=calls)
    assert len(traced) >= calls if options else len(traced) <= 12  # three times from the 16th call on


def test_unguarded_changes_are_found_by_spot_checks(monkeypatch):
    codecs.register_error("strange", lambda error: ("a", error.end))
    step = fl.trace(lambda x: x if b"\xff".decode("ascii", "strange") == "a" else -x)
    assert quiet(step, X, count=4) == [[1.0, 2.0]] * 4

    monkeypatch.setattr(cache_entry, "_CHECKING", 1e9)  # unlimited time
    codecs.register_error("strange", lambda error: ("b", error.end))
    with pytest.raises(GraphChangedError, match="4 steps ago"):
        step(X)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: random.gauss(0, 1)])
def test_pythons_random_numbers_are_drawn_at_each_call(draw):
    seed = 1 if draw is not random.random else 2

    def seeded():
        random.seed(seed)
        np.random.seed(seed)

    seeded()
    expected = [1.0 if draw() < 0.5 else 2.0 for _ in range(8)]
    assert len(set(expected)) == 2
    seeded()
    step = fl.trace(lambda x: x.sum() * (1.0 if draw() < 0.5 else 2.0))
    with pytest.warns(GraphChangeWarning, match=r"random generator|what gauss\(\) draws"):
        assert [step(X).item() / 3 for _ in range(8)] == expected
    assert traces(step) == (0 if draw is np.random.rand else 2)  # reached as an object of C: its Python runs


# -- shapes -----------------------------------------------------------------------------------------------------------


def rows(n, width=3):
    return {"x": torch.arange(float(n * width)).reshape(n, width), "labels": torch.zeros(n, dtype=torch.long)}


def loss(batch):
    return nn.functional.cross_entropy(batch["x"], batch["labels"], reduction="sum")


def test_a_new_shape_is_compiled_with_a_notice():
    step = fl.trace(loss)
    quiet(step, rows(4), count=2)
    with pytest.warns(GraphChangeWarning, match=r"x float32\[2, 3\] \(before: float32\[4, 3\]\)"):
        assert step(rows(2)).item() == pytest.approx(loss(rows(2)).item())
    quiet(step, rows(4))
    quiet(step, rows(2))


def test_a_new_shape_is_refused():
    step = fl.trace(shapes="refuse")(loss)
    quiet(step, rows(4), count=2)
    with pytest.raises(ShapeError, match=r"labels int64\[2\] \(before: int64\[4\]\).*drop_last=True"):
        step(rows(2))
    quiet(step, rows(4))


def test_a_new_shape_is_padded():
    step = fl.trace(shapes=fl.Pad(values={"labels": -100}, multiple_of=4))(loss)
    for n in (4, 3, 1, 4):
        torch.testing.assert_close(torch.tensor(quiet(step, rows(n))[0]), loss(rows(n)))
    assert traces(step) == 1
    with pytest.warns(GraphChangeWarning, match="recompiled"):
        torch.testing.assert_close(step(rows(6)).clone(), loss(rows(6)))
    for n in (8, 5, 3):  # 6 is rounded up to 8
        torch.testing.assert_close(torch.tensor(quiet(step, rows(n))[0]), loss(rows(n)))
    assert traces(step) == 2


def test_a_number_as_an_argument_is_an_input_from_its_second_value_on():
    step = fl.trace(lambda x, *, factor: x * factor)
    for factor in (2, 3, 4, 5):
        assert quiet(lambda: step(X, factor=factor)) == [[1.0 * factor, 2.0 * factor]]  # noqa: B023 - called at once
    assert traces(step) == 2


def test_a_flag_as_an_argument_is_named():
    step = fl.trace(lambda x, *, double: x * 2 if double else x)
    assert quiet(lambda: step(X, double=True)) == [[2.0, 4.0]]
    with pytest.warns(GraphChangeWarning, match="double False .before: True.*as a tensor"):
        assert step(X, double=False).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("options", [{"shapes": "pad"}, {"changes": "ignore"}, {"reads": "ignore"}])
def test_invalid_options_are_refused(options):
    with pytest.raises(fl.errors.TraceError, match=next(iter(options.values()))):
        fl.trace(**options)(loss)


# -- reading values in a step -----------------------------------------------------------------------------------------


def raise_if(x):
    if x.max() < 0:
        raise ValueError("input1 must have positive elements!")


READS = {
    "branch": raise_if,
    "print": lambda x: print(x),
    "logging": lambda x: logging.getLogger("a step").warning("%s", x),
    "format": lambda x: f"{x.sum():.3f}",
    "text": lambda x: str(x),
    "text in a list": lambda x: [repr({"x": x})],
    "assert": lambda x: _assert(x),
    "to cpu": lambda x: x.to("cpu").tolist(),
    "cpu": lambda x: x.cpu().numpy(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.sum()),
    "range": lambda x: range(x.long().sum()),
    "index": lambda x: [1, 2][x.long()[0]],
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x + 1),
    "while": lambda x: next(iter(x.unique())),
}


def _assert(x):
    assert x.sum() > 0


@pytest.mark.parametrize("kind", READS)
def test_reading_a_value_in_a_step_names_the_line(kind, capsys, caplog):
    @fl.trace(reads="refuse")
    def step(x):
        READS[kind](x)
        return x

    if kind in ("print", "logging"):  # after each call
        for x in (X, X * 2, X * 3):
            step(x).tolist()
            READS[kind](x)
            written, expected = capsys.readouterr().out.splitlines() if kind == "print" else caplog.messages
            assert written == expected
            caplog.clear()
        return
    with pytest.raises(fl.errors.ValueReadError) as caught:
        step(X)
    instead = "F.one_hot" if kind == "while" else "torch.where"  # of unique: sort, and compare neighbours
    assert kind == "logging" or f"{__file__}:" in str(caught.value)
    assert instead in str(caught.value) or "fl.step_closure" in str(caught.value)


def test_the_text_of_a_constant_is_known():
    @fl.trace
    def step(x):
        return x * len(str(torch.tensor([1, 2]) + 1))

    assert step(X).tolist() == (X * len("tensor([2, 3])")).tolist()


def test_anomaly_detection_is_refused_by_name():
    weight = torch.ones(2, requires_grad=True)

    @fl.trace(reads="refuse")
    def step(x):
        (weight * x).sum().backward()

    with torch.autograd.set_detect_anomaly(True), pytest.raises(fl.errors.ValueReadError, match="set_detect_anomaly"):
        step(X)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_a_sparse_tensor_of_rows_matches_eager():
    rows = torch.eye(2).to_sparse_csr()
    check_runs_eagerly(lambda backend, trace: [trace(lambda x: rows @ x)(X)], f"{__file__}:.*sparse_csr.*dense")
    with pytest.raises(fl.errors.CaptureError, match=f"{__file__}:.*sparse_csr.*dense"):
        fl.trace(lambda x: rows @ x, reads="refuse")(X)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["sparse", "nested", "quantized"])
def test_an_argument_that_is_not_dense_matches_eager(kind):
    argument = {
        "sparse": lambda: torch.eye(2).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([X, X[:1]]),
        "quantized": lambda: torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
    }[kind]()

    def run(backend, trace):
        step = trace(lambda x, argument: x.sum() + argument.dim())
        return [step(X, argument) for _ in range(2)]

    check_runs_eagerly(run, f"{__file__}:.*dense.*{kind}")


@pytest.mark.parametrize("base", [lambda x: x, lambda x: x + 1, lambda x: torch.ones(2, 2)])
def test_a_view_beyond_its_storage_is_pytorchs_error(base):
    def beyond(x):
        return base(x).as_strided((2, 2), (1, 2), 2) * x.sum()

    with pytest.raises(RuntimeError, match="out of bounds for storage of size 16"):
        fl.trace(beyond)(torch.ones(2, 2))
    with pytest.raises(fl.errors.CaptureError, match=f"{__file__}:.*as_strided.*16"):
        fl.trace(beyond, reads="refuse")(torch.ones(2, 2))


def test_moving_a_counter_to_the_backend_is_not_a_change(backend):
    """It is on the host when first used, before the weights, and on the backend from then on."""
    model = nn.Linear(2, 2)
    compiled, count = fl.compile(model, backend), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fl.trace
    def step(x):
        count.add_(1)
        loss = compiled(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    quiet(step, torch.ones(1, 2), count=4)
    assert traces(step) == 1 and count.item() == 4


def test_a_reflected_comparison_with_a_counter_is_not_a_change(backend):
    limit = torch.zeros(())

    @fl.trace
    def step(x):
        limit.add_(1)
        return torch.where(limit > x * 1, limit >= x * 2, limit < x * 3)

    for n in (1, 2, 3):
        x = torch.tensor(1.5)
        assert bool(step(x)) == ((n >= 3.0) if n > 1.5 else (n < 4.5))
    assert traces(step) == 1


def test_computed_names_are_guarded_for_weights_in_any_state(tmp_path):
    """The same graph for weights in another state: its Python's reads are resolved there too."""

    def run(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
        compiled = fl.compile(model, backend)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        globals()["worked_out"] = torch.zeros(3)

        @fl.trace
        def step(x):
            out = compiled(x)
            loss = out.square().mean() + (globals()["worked" + "_out"] * out.mean(0)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            globals()["worked" + "_out"] = globals()["worked" + "_out"] * 0.5 + 0.5
            return loss.detach()

        for i in range(8):
            if i == 4:  # the optimizer does not clear the gradient of the frozen weight
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
            yield step(torch.full((2, 3), float(i)))
            yield globals()["worked_out"].clone()

    expected = list(run(fl.backend("CPU")))
    actual = list(run(fl.backend("XLA", artifact_dir=tmp_path)))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)  # XLA sums in another order


def test_a_warning_is_issued_once_at_the_line_of_the_call():
    settings = {"scale": "1"}

    @fl.trace
    def step(x):
        return x * float(settings["scale"])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for settings["scale"] in ("1", "2", "3"):
            step(X)
    assert [(w.filename, w.category) for w in caught] == [(__file__, GraphChangeWarning)] * 2  # two texts
    assert {w.lineno for w in caught} == {int(str(w.message).split(":")[1]) for w in caught}
