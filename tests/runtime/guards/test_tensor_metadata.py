"""Properties of outside tensors other than their values: layout, class, address, identity as dict keys, repr. They
change before some calls, and the step follows."""

import types

import pytest
import torch

import firstloss as fl
from firstloss.runtime.step import compiling
from tests.fuzz.interpret import interpreted

CASES = {}


class Own(torch.Tensor):
    pass


def case(make):
    """Register an object whose tensors the step reads, a function that reads them, and what is done before the i-th
    call."""
    CASES[make.__name__] = make
    return make


@case
def strides():
    held = types.SimpleNamespace(t=torch.ones(3, 3))

    def change(i):
        held.t = torch.arange(9.0).reshape(3, 3).t() if i in (3, 4) else torch.ones(3, 3)

    return lambda: 2.0 if held.t.stride(0) == 1 else held.t.mean(), change


@case
def tensor_class():
    held = types.SimpleNamespace(t=torch.ones(3))
    return (
        lambda: 2.0 if type(held.t) is Own else 1.0,
        lambda i: setattr(held, "t", torch.ones(3).as_subclass(Own) if i in (3, 4) else torch.ones(3)),
    )


@case
def shared_memory():
    held = types.SimpleNamespace(a=torch.ones(3))
    return (
        lambda: 2.0 if held.a.data_ptr() == held.b.data_ptr() else 1.0,
        lambda i: setattr(held, "b", torch.ones(3) if i in (3, 4) else held.a.view(3)),
    )


@case
def same_tensor():
    held = types.SimpleNamespace(a=torch.ones(3))
    return (
        lambda: 2.0 if held.a is held.b else 1.0,
        lambda i: setattr(held, "b", torch.ones(3) if i in (3, 4) else held.a),
    )


@case
def dict_key():
    key = torch.ones(1)
    held, numbers = types.SimpleNamespace(), {key: 3.0}
    return (
        lambda: numbers.get(held.t, 1.0),
        lambda i: setattr(held, "t", torch.ones(1) if i in (3, 4) else key),
    )


@case
def repr_text():
    held = torch.tensor(1.0)
    return lambda: float(repr(held)[7]), lambda i: held.fill_(1.0 + i // 2)


@case
def format_text():
    held = torch.tensor(1.0)
    return lambda: float(f"{held:.1f}"), lambda i: held.fill_(1.0 + i // 2)


@case
def tolist_values():
    held = torch.tensor([1.0])
    return lambda: held.tolist()[0], lambda i: held.fill_(1.0 + i // 2)


@case
def length():
    held = types.SimpleNamespace()
    return lambda: float(len(held.t)), lambda i: setattr(held, "t", torch.ones(1 + i // 2))


@case
def dtype():
    held = types.SimpleNamespace()
    return (
        lambda: 2.0 if held.t.dtype == torch.float64 else 1.0,
        lambda i: setattr(held, "t", torch.ones(1, dtype=torch.float64 if i in (3, 4) else torch.float32)),
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_metadata_of_a_tensor_is_guarded(name, monkeypatch):
    monkeypatch.setattr(compiling, "compile_step", interpreted)

    def run(backend):
        ask, change = CASES[name]()

        @fl.trace
        def step(x):
            return x * ask()

        results = []
        for i in range(6):
            change(i)
            results.append(step(torch.ones(2))[0].item())
        return results

    assert run(fl.backend("XLA")) == run(fl.backend("CPU"))
