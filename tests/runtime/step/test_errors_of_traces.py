"""Errors that a step's Python raises while it is traced.

They are raised if eager PyTorch raises them too, with all that the step has done before; otherwise its Python runs."""

import json
import re
import signal
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning, NotMaterializedWarning

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
ADJACENCY = torch.eye(6).roll(1, 0).to_sparse()

# Operations whose results are no strided tensors, or that only work on tensors with memory: each makes a number of h.
UNTRACEABLE = {
    "sparse": lambda h: torch.sparse.sum(h.to_sparse()),
    "sparse, in a product": lambda h: torch.sparse.mm(h.to_sparse(), h.t()).sum(),
    "compressed rows": lambda h: h.to_sparse_csr().to_dense().sum(),
    "quantized": lambda h: torch.quantize_per_tensor(h.detach(), 0.1, 10, torch.quint8).dequantize().sum() + h.sum(),
    "of oneDNN": lambda h: h.detach().to_mkldnn().to_dense().sum() * h.sum(),
    "sparse rows from outside": lambda h: (torch.eye(6).to_sparse_csr() @ h.detach().t()).sum() * h.sum(),
    "sparse, from outside": lambda h: torch.sparse.mm(ADJACENCY, h.t()).sum(),
    "sparse, from outside, beside a mask": lambda h: torch.sparse.mm(ADJACENCY, h.t())[h.t() > 0].sum(),
    "nested": lambda h: torch.nested.nested_tensor([h, h[:2]], layout=torch.jagged).values().sum(),
    "complex least squares": lambda h: (
        torch.linalg.lstsq(h.detach().to(torch.complex64), h.detach().to(torch.complex64)).solution.real.sum() + h.sum()
    ),
    "packed": lambda h: nn.utils.rnn.pack_padded_sequence(h[None], [4], batch_first=True).data.sum(),
    "its class": lambda h: h.sum() if type(h) is torch.Tensor else h.no_such_method(),
}


class Stop(Exception):
    """An error of the user's own."""


def train(name, step_of, calls):
    """Results or errors of each call, what the step has noted, its weights, and the warnings."""
    torch.manual_seed(0)
    backend = fl.backend(name)
    with backend.device:
        net = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    model = fl.compile(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    notes: list = []
    state = {"call": 0}
    step = fl.trace(step_of(model, optimizer, notes, state))
    results = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for call in range(calls):
            state["call"] = call
            try:
                results.append(step(X + call))
            except Exception as error:
                results.append((type(error), str(error)))
    noted = [n.clone() if isinstance(n, torch.Tensor) else n for n in notes]
    weights = [p.detach().clone() for p in net.parameters()]
    return results, noted, weights, [str(w.message) for w in told if issubclass(w.category, EagerStepWarning)]


def assert_same(ours, eager):
    """Like eager PyTorch, up to XLA's order of summation (and exactly in what is no tensor)."""
    for mine, theirs in zip(ours[:3], eager[:3], strict=True):
        assert len(mine) == len(theirs), (mine, theirs)
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(b, torch.Tensor):
                torch.testing.assert_close(a.detach(), b.detach())
            else:
                assert a == b


@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("where", ["forward", "after the update"])
@pytest.mark.parametrize("kind", UNTRACEABLE)
def test_what_only_a_trace_raises_is_not_raised(kind, where, first):
    """From call `first` on the step does what a trace cannot."""

    def step_of(model, optimizer, notes, state):
        def step(x):
            h = model(x)
            loss = h.square().mean()
            if where == "forward" and state["call"] >= first:
                loss = loss + UNTRACEABLE[kind](h)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if where != "forward" and state["call"] >= first:
                notes.append(UNTRACEABLE[kind](model(x)))
            return loss

        return step

    ours, eager = train("XLA", step_of, 6), train("CPU", step_of, 6)
    assert_same(ours, eager)
    assert all(isinstance(result, torch.Tensor) for result in ours[0])
    assert len(ours[3]) <= 2 and all(text.startswith(__file__) for text in ours[3]), ours[3]


def test_a_step_that_cannot_be_traced_may_be_the_first_to_use_weights():
    backend = fl.backend("XLA")
    with backend.device:
        net = nn.Linear(6, 6)
    step = fl.trace(lambda x: UNTRACEABLE["packed"](net(x)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotMaterializedWarning)
        with pytest.warns(EagerStepWarning):
            result = step(X)
    torch.testing.assert_close(result, net(X).sum())


def raises_key(state):
    return {}[state["call"]]


def raises_own(state):
    raise Stop("enough")


def raises_assertion(state):
    assert state["call"] < 0, "too late"


def raises_in_torch(state):
    return F.linear(torch.ones(2, 3), torch.ones(4, 5))


RAISING = [raises_key, raises_own, raises_assertion, raises_in_torch]


@pytest.mark.parametrize("at", [(0,), (1, 2), (4,), (0, 1, 2, 3, 4, 5)])
@pytest.mark.parametrize("where", ["first", "after backward", "after the update"])
@pytest.mark.parametrize("raises", RAISING)
def test_what_eager_pytorch_raises_is_raised_with_what_came_before(raises, where, at):
    def step_of(model, optimizer, notes, state):
        def step(x):
            notes.append(state["call"])
            if where == "first" and state["call"] in at:
                raises(state)
            loss = model(x).square().mean()
            notes.append(loss.detach())
            loss.backward()
            if where == "after backward" and state["call"] in at:
                raises(state)
            optimizer.step()
            if where == "after the update" and state["call"] in at:
                raises(state)
            optimizer.zero_grad()
            return loss

        return step

    ours, eager = train("XLA", step_of, 6), train("CPU", step_of, 6)
    assert_same(ours, eager)
    assert sum(isinstance(result, tuple) for result in ours[0]) == len(at)
    assert not any(re.search(r"raises \w+ while", text) for text in ours[3]), ours[3]


def test_an_item_of_a_generator_is_taken_once():
    """A generator cannot be put back, so the step is not run a second time at the call."""

    def step_of(model, optimizer, notes, state):
        numbers = (n for n in range(3))

        def step(x):
            notes.append(next(numbers))
            raise Stop

        return step

    ours, eager = train("XLA", step_of, 4), train("CPU", step_of, 4)
    assert_same(ours, eager)


class Handler:
    """A handler that is an object, or one of its methods."""

    def __call__(self, number, frame):
        self.method(number, frame)

    def method(self, number, frame):
        raise RuntimeError("of a handler")


def handle(number, frame):
    raise RuntimeError("of a handler")


@pytest.mark.parametrize("handler", [handle, Handler(), Handler().method, lambda *_: handle(*_)])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_a_signals_handler_raises_is_raised(handler, at):
    """A second run of the step would not be interrupted, and the error be lost."""

    def step_of(model, optimizer, notes, state):
        raised = []

        def step(x):
            loss = model(x).square().mean()
            notes.append(loss.detach())
            if state["call"] == at and not raised:
                raised.append(True)
                signal.raise_signal(signal.SIGUSR1)
            return loss

        return step

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        results, notes, _, told = train("XLA", step_of, 5)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results[at] == (RuntimeError, "of a handler") and len(notes) == 5
    assert not any("while step is traced" in text for text in told)


def test_an_error_about_an_input_number_is_not_the_steps():
    """json knows no numbers that are inputs: the step is traced with the plain number, and compiled."""

    def step_of(model, optimizer, notes, state):
        def step(x):
            notes.append(json.dumps({"call": state["call"]}))
            return model(x).sum() * state["call"]

        return step

    ours, eager = train("XLA", step_of, 5), train("CPU", step_of, 5)
    assert_same(ours, eager)
    assert not any("while step is traced" in text for text in ours[3]), ours[3]
