"""Numbers of a step that Python computes in ways that are not seen, as in `temperatures[epoch]`: once they have
changed, they are inputs, and the step is traced again for others, but not compiled."""

import itertools
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import GraphChangeWarning
from tests import scale
from tests.compiled_steps import compilations

EPOCHS = [0, 0, 1, 1, 2, 2, 3, 3, 4, 0, 5, 2]
VALUES = [0.5 + 0.1 * i for i in range(6)]

# How a step gets the number of an epoch.
TABLES = {
    "list": lambda: VALUES.__getitem__,
    "array": lambda: np.array(VALUES).__getitem__,
    "float32 array": lambda: np.array(VALUES, np.float32).__getitem__,
    "dict": lambda: dict(enumerate(VALUES)).__getitem__,
    "of whole numbers": lambda: [3, 2, 5, 7, 1, 4].__getitem__,
    "text": lambda: lambda epoch: float(f"0.{epoch + 1}5"),
}
# What it does with it, and with tensors of the shape of the batch.
USES = {
    "div": lambda x, y, t: x / t,
    "rdiv": lambda x, y, t: t / (x.square() + 1),
    "mul": lambda x, y, t: t * x,
    "rsub": lambda x, y, t: t - x,
    "pow": lambda x, y, t: (x.square() + 0.1) ** t,
    "rpow": lambda x, y, t: t**x,
    "alpha": lambda x, y, t: torch.add(x, y, alpha=t),
    "in place": lambda x, y, t: x.clone().mul_(t).add_(y, alpha=t),
    "lerp": lambda x, y, t: torch.lerp(x, y, t),
    "clamp": lambda x, y, t: x.clamp(-t, t),
    "masked_fill": lambda x, y, t: x.masked_fill(y > 0, t),
    "where": lambda x, y, t: torch.where(y > 0, x, t),
    "addcmul": lambda x, y, t: torch.addcmul(x, x, y, value=t),
    "full_like": lambda x, y, t: x + torch.full_like(x, t),
    "full": lambda x, y, t: x + torch.full((4,), float(t)),
    "fill_": lambda x, y, t: x * y.clone().fill_(t),
    "tensor": lambda x, y, t: x * torch.tensor(t),
    "leaky_relu": lambda x, y, t: F.leaky_relu(x, t),
    "elu": lambda x, y, t: F.elu(x, t),
    "softplus": lambda x, y, t: F.softplus(x, t),
    "dropout": lambda x, y, t: F.dropout(x, 0.0 * t),
    "pad": lambda x, y, t: F.pad(x, (1, 1), value=float(t)),
    "smooth_l1": lambda x, y, t: F.smooth_l1_loss(x, y, beta=t),
    "cross_entropy": lambda x, y, t: F.cross_entropy(x, y.softmax(-1), label_smoothing=t / 10),
    "margin": lambda x, y, t: F.triplet_margin_loss(x, y, y + 1, margin=t),
    "norm": lambda x, y, t: F.layer_norm(x, (4,), eps=t),
    "scale of attention": lambda x, y, t: F.scaled_dot_product_attention(x[None], y[None], x[None], scale=t),
    "foreach": lambda x, y, t: sum(torch._foreach_mul([x, y], t)),
    "compare": lambda x, y, t: x * (x > t),
    "gradient": lambda x, y, t: torch.autograd.grad((x * t).square().sum(), x, create_graph=True)[0],
    "int": lambda x, y, t: x[:, : int(t) % 4 + 1],
    "roll": lambda x, y, t: x.roll(int(t * 10), 1),
    "twice": lambda x, y, t: (x * t + y * t) * (t + 1),
}
# Not a Scalar of an operation, but a float, a size or part of a list, or folded into a constant.
BAKED_IN = ("tensor", "full", "full_like", "int", "roll", "foreach", "smooth_l1", "norm")


def run(table, use, backend):
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(4, 4)
    compiled, number, use = fl.compile(model, backend), TABLES[table](), USES[use]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    @fl.trace
    def step(x, y, epoch):
        loss = use(compiled(x), y, number(epoch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    generator = torch.Generator().manual_seed(1)
    results = []
    for epoch in EPOCHS:
        x, y = (torch.randn(3, 4, generator=generator) for _ in range(2))
        results += [step(x, y, epoch).detach().clone(), *(p.detach().clone() for p in model.parameters())]
    return results, step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(3))
def test_numbers_from_tables_are_as_in_eager(part, by_kernels):
    for table, use in list(itertools.product(TABLES, USES))[part :: 3 * scale.of(2, 1)]:
        expected, _ = run(table, use, fl.backend("CPU"))
        actual, _ = run(table, use, fl.backend("XLA"))
        # float32, the same operations; sums in another order differ in the last places
        how = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True, "msg": lambda text, case=(table, use): f"{case}: {text}"}
        torch.testing.assert_close(actual, expected, **how)


@pytest.mark.parametrize("use", [use for use in USES if use not in BAKED_IN])
def test_a_step_is_not_compiled_for_each_number(use, by_kernels):
    """But for the first four: once it is seen to change twice, it becomes an input."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", GraphChangeWarning)
        _, step = run("list", use, fl.backend("XLA"))
    assert compilations(step) <= 4
    assert sum(issubclass(w.category, GraphChangeWarning) for w in caught) <= 2


@pytest.mark.filterwarnings("ignore")
def test_a_number_whose_class_python_asks_for_is_no_input(by_kernels):
    """An input number is of another class: the sum below would be 0. That a constant there is an input does not hide it
    from the comparison with a trace without input numbers."""

    def losses(backend):
        torch.manual_seed(0)
        with backend.device:
            model = nn.Linear(4, 4)
        compiled, weights = fl.compile(model, backend), {"first": 1.0, "second": 0.5}

        @fl.trace
        def step(x):
            loss = compiled(x).square().mean() * sum(w for w in weights.values() if type(w) is float)
            weights.pop("second", None)
            return loss

        for first in (1.0, 1.0, 1.0, 0.6, 0.7, 0.6, 0.8):
            weights["first"] = first
            yield step(torch.ones(2, 4)).item()

    assert list(losses(fl.backend("XLA"))) == pytest.approx(list(losses(fl.backend("CPU"))), rel=1e-6)


@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_number_that_changes_unseen_is_found_by_the_check(by_kernels):
    """Also where it has become an input, whose values are not compared between two Programs."""
    torch.manual_seed(0)
    backend, hidden = fl.backend("XLA"), iter([0.1 * i for i in range(40)])
    with backend.device:
        model = nn.Linear(4, 4)
    compiled, table = fl.compile(model, backend), np.array(VALUES)

    @fl.trace
    def step(x, epoch):
        factor = table[epoch] if epoch < 4 else float(str(next(hidden)))
        return compiled(x).square().mean() * factor

    x = torch.ones(2, 4)
    expected = model(x).square().mean().item()
    for epoch in (0, 1, 2, 3):
        assert step(x, epoch).item() == pytest.approx(expected * table[epoch], rel=1e-6)
    for i in range(8):
        assert step(x, 4).item() == pytest.approx(expected * 0.1 * i, rel=1e-6)
