"""Python numbers and texts that change from call to call are inputs of a step, and it computes what eager does."""

import array
import itertools
import math
import os
import time
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, GraphChangeWarning
from tests import compiled_steps

X = torch.tensor([1.0, 2.0])
PATHS = [["a.png", "b.png"], ["c.png", "d.png"], ["e.jpg", "f.png"], ["a.png", "b.png"], ["g.png", "h.jpg"]]

pytestmark = pytest.mark.usefixtures("backend")


def outcomes(step, calls):
    """What each call returns, as plain values."""
    return [result.tolist() if isinstance(result := step(*call), torch.Tensor) else result for call in calls]


def test_a_number_that_the_step_tells_from_a_float_is_part_of_the_compiled_step():
    def step(x, k):
        return (x * 2 if type(k) is float else x) * k

    calls = [(X, k) for k in (0.5, 0.75, 0.75, 0.75, 0.75, 1.5, 0.5, 1.5)]
    assert outcomes(fl.trace(step), calls) == outcomes(step, calls)


@pytest.mark.parametrize("ask", [lambda: None, time.monotonic, lambda: os.listdir("."), lambda: os.stat(".")])
@pytest.mark.parametrize("tell", [lambda k: type(k).__name__, lambda k: [type(k) is float], lambda k: {"k": type(k)}])
@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
def test_what_a_step_leaves_of_a_numbers_type_is_as_by_eager(tell, ask):
    def run(trace):
        held, log = {"k": 1.0}, []

        @trace
        def step(x):
            ask()
            held["k"] = held["k"] * 0.75 + 0.5
            log.append((tell(held["k"]), held["k"]))
            return x * held["k"], tell(held["k"])

        return [step(X)[1] for _ in range(5)], log

    assert run(fl.trace) == run(lambda step: step)


@pytest.mark.parametrize("use", [lambda k: round(k, 1), int, lambda k: math.floor(k) + k, str, lambda k: k > 0.6])
def test_a_number_is_used_as_by_eager(use):
    def step(x, k):
        return x * k, use(k)

    calls = [(X, k) for k in (0.5, 0.75, 0.75, 1.5, 0.5, 1.5, 0.61, 0.59)]
    traced = fl.trace(step)
    for call in calls:
        (scaled, used), (expected, as_eager) = traced(*call), step(*call)
        assert scaled.tolist() == expected.tolist()
        assert used == as_eager and type(used) is type(as_eager)


def test_an_exception_that_a_number_raises_is_caught_as_by_eager():
    def step(x, k):
        try:
            return x * math.log(k)
        except ValueError:
            return x - 1

    calls = [(X, k) for k in (1.0, 2.0, -1.0, 3.0, -2.0, -1.0, 2.0)]
    assert outcomes(fl.trace(step), calls) == outcomes(step, calls)


def test_texts_that_are_only_handed_on_cost_one_trace():
    seen = []

    @fl.trace
    def step(batch):
        seen.append(batch["path"])
        return batch["x"] * 2, batch["path"][0], batch["id"]

    for i, paths in enumerate(PATHS):
        if i == 2:
            traces = compiled_steps.compilations(step), len(compiled_steps.steps(step))
        doubled, path, number = step({"x": X * i, "path": paths, "id": i})
        assert doubled.tolist() == [2.0 * i, 4.0 * i]
        assert (path, number) == (paths[0], i) and (type(path), type(number)) == (str, int)
    assert seen == PATHS and all(type(text) is str for paths in seen for text in paths)
    assert (compiled_steps.compilations(step), len(compiled_steps.steps(step))) == traces


@pytest.mark.parametrize(
    "use",
    [
        lambda path: path.endswith(".png"),
        lambda path: "a" in path,
        lambda path: path == "a.png",
        lambda path: len(path) > 5,
        lambda path: path[0] == "a",
        lambda path: path + "x" == "a.pngx",
        lambda path: f"{path}" == "a.png",
        lambda path: {"a.png": True}.get(path, False),
        lambda path: "".join([path, "x"]) == "a.pngx",
        lambda path: isinstance(path, str) and path.upper() == "A.PNG",
        lambda path: type(path) is str and path > "b",
        lambda path: hasattr(path, "shape") or path.split(".")[-1] == "jpg",
        lambda path: sorted(path)[0] == ".",
        lambda path: "%s" % path == "a.png",  # noqa: UP031
        lambda path: hash(path) == hash("a.png"),
        lambda path: path.isdigit(),
    ],
)
def test_what_depends_on_a_text_is_as_by_eager(use):
    def step(x, path):
        return x * 2 if use(path) else x + 1

    calls = [(X, path) for path in ("a.png", "b.png", "c.jpg", "a.png", "a.png", "12345", "long.png", "b.png", "a.png")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        assert outcomes(fl.trace(step), calls) == outcomes(step, calls)


def test_bytes_are_texts():
    def step(x, key):
        return x * len(key), key

    traced = fl.trace(step)
    for key in (b"a", b"b", b"c", b"dd", b"e"):
        result, returned = traced(X, key)
        assert result.tolist() == (X * len(key)).tolist()
        assert returned == key and type(returned) is bytes


def test_a_mode_is_compiled_once_for_each_of_its_values():
    def step(x, mode):
        return x * 2 if mode == "train" else x

    traced = fl.trace(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GraphChangeWarning)
        for mode in ("train", "val", "train", "val", "train", "test", "val"):
            assert traced(X, mode).tolist() == step(X, mode).tolist()
    assert compiled_steps.compilations(traced) <= 3


def test_closures_get_the_numbers_and_texts_of_their_call():
    got = []

    @fl.step_closure
    def log(loss, beta, path):
        got.append((loss.item(), beta, path))

    @fl.trace
    def step(x, beta, path):
        log(x.sum(), beta, path)
        log(x.sum(), beta * 2, path)

    expected = []
    for i in range(6):
        step(X * i, i / 4, f"{i}.png")
        expected += [(3.0 * i, i / 4, f"{i}.png"), (3.0 * i, i / 2, f"{i}.png")]
    assert got == expected


def test_numbers_are_printed_as_they_are_at_each_call(capsys):
    @fl.trace
    def step(x, beta):
        print(x.sum(), beta)

    for i in range(5):
        step(X * i, i / 4)
    assert capsys.readouterr().out.splitlines() == [f"tensor({3.0 * i:.0f}.) {i / 4}" for i in range(5)]


def test_an_exception_of_one_call_does_not_make_later_ones_slow():
    def step(x, k):
        if k > 5:
            raise ValueError("too large")
        return x * k

    traced = fl.trace(step)
    for k in (0.5, 0.75, 6.0, 1.5):
        try:
            assert traced(X, k).tolist() == step(X, k).tolist()
        except ValueError as error:
            assert k > 5 and "too large" in str(error)
    compiled = compiled_steps.compilations(traced)
    with warnings.catch_warnings():
        warnings.simplefilter("error", GraphChangeWarning)
        warnings.simplefilter("error", EagerStepWarning)
        for k in (0.1, 0.2, 0.3):
            assert traced(X, k).tolist() == step(X, k).tolist()
    assert compiled_steps.compilations(traced) == compiled


def test_a_module_takes_texts(backend):
    with backend.device:
        model = nn.Linear(2, 2)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @fl.trace
    def step(batch):
        loss = compiled(batch["x"]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss, "path": batch["path"]}

    for i in range(5):
        assert step({"x": X, "path": [f"{i}a", f"{i}b"]})["path"] == [f"{i}a", f"{i}b"]
    assert compiled_steps.compilations(step) == 1


ITERATORS = [lambda: itertools.pairwise(range(1, 50)), lambda: iter([(n, 0) for n in range(50)])]


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("numbers", ITERATORS)
def test_an_iterator_beside_a_number_is_advanced_once_at_each_call(numbers):
    """Its position cannot be restored, so that no second trace may prove that the number can be an input."""

    def run(trace):
        taken = numbers()

        @trace
        def step(x, counts):
            counts["k"] += 1
            return x * float(next(taken)[0])

        counts = {"k": 0}
        return [step(X, counts).tolist() for _ in range(6)], counts

    assert run(fl.trace) == run(lambda step: step)


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
@pytest.mark.parametrize("make", [bytearray, lambda: array.array("i"), lambda: array.array("d", [1.0])])
def test_a_buffer_that_grows_beside_a_number_is_restored(make):
    """After the trace that proves that the number can be an input."""

    def run(trace):
        grown, scale = make(), [2.0]

        @trace
        def step(x):
            grown.append(1)
            return x * scale[0] * (1 + len(grown))

        results = []
        for i in range(6):
            scale[0] = 2.0 if i < 4 else 0.5 * i
            results.append(step(X).tolist())
        return results, list(grown)

    assert run(fl.trace) == run(lambda step: step)


def test_numbers_that_are_described_alike_are_each_checked(by_kernels, tmp_path):
    """The step's Python sees of one of them that it is an input, after it has been shown for the other that it is not
    seen."""

    def run(backend):
        counts, sizes, kinds = [0], [0.8], []
        compiled = fl.compile(nn.Linear(4, 3), backend)

        @fl.trace
        def step(x):
            counts[0] += 1
            sizes[0] = np.sqrt(sizes[0] + 1)
            kinds.append(type(sizes[0]).__name__)
            return compiled(x).sum()

        for _ in range(5):
            step(torch.ones(2, 4))
        return kinds, counts, sizes

    assert run(fl.backend("XLA", artifact_dir=tmp_path)) == run(fl.backend("CPU"))


def test_the_name_of_a_numbers_class_where_the_optimizer_is_new_at_each_call(tmp_path):
    """Nothing then shows that the step's Python treats an input number as it treats a number."""
    model = fl.compile(torch.nn.Linear(2, 2), fl.backend("XLA", artifact_dir=tmp_path))
    state, kept = {"number": 0.8, "optimizer": None}, []

    @fl.trace
    def step(x):
        state["number"] *= 1.1
        loss = model(x).sum()
        loss.backward()
        state["optimizer"].step()
        kept.append((type(state["number"]).__name__, type(state["number"]) is float))

    for _ in range(5):
        state["optimizer"] = torch.optim.AdamW(model.parameters())
        step(torch.ones(1, 2))
    assert kept == [("float", True)] * 5
