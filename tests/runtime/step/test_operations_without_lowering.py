"""A step of new weights with an operation that cannot be lowered runs by its Python, like eager PyTorch.

That is found out before the first loss is returned: later, in the background, the update could only fail.
"""

import warnings

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning
from tests import scale
from tests.lower.outcomes import read_outcomes
from tests.op_db import op_db

MASK = torch.tensor([True, False, True, True])


def by_mask_and_index(h):
    h = h.clone()
    h[MASK, torch.tensor([0, 1, 0])] = h.new_tensor([1.0, 2.0, 3.0])
    return h


def by_masks(h):
    h = h.clone()
    h[MASK, torch.tensor([True, False])] = 1.0
    return h


# Operations of h whose rule refuses these arguments, or whose decomposition calls something that has no rule.
REFUSED = {
    "a mask beside another index": by_mask_and_index,
    "two masks": by_masks,
    "complex32": lambda h: h.to(torch.complex64).to(torch.complex32).to(torch.complex64).real,
    "float8_e8m0fnu": lambda h: h.to(torch.float8_e8m0fnu).float(),
    "bessel_j0": lambda h: torch.special.bessel_j0(h.detach()),
    "spherical_bessel_j0": lambda h: torch.special.spherical_bessel_j0(h.detach()),
}
# Those that PyTorch's tests have samples of, and of which the sweep has found some that are not lowered.
LISTED = [
    name
    for name, row in read_outcomes().items()
    if {"absent", "refused"} & {outcome for outcomes in row["dtypes"].values() for outcome in outcomes}
]
OPS = {"".join((op.name, "." * bool(op.variant_test_name), op.variant_test_name)): op for op in op_db}


def train(name, function, calls=3):
    """Losses and results of each call, the weights afterwards, and the warnings."""
    torch.manual_seed(0)
    backend = fl.backend(name)
    with backend.device:
        net = nn.Linear(3, 2)
    model = fl.compile(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = []

    @fl.trace
    def step(x):
        h = model(x)
        result = function(h)
        kept.append(result)
        loss = h.square().mean()
        if isinstance(result, torch.Tensor) and result.requires_grad:
            loss = loss + result.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses = [step(torch.arange(12.0).view(4, 3) / 10 + call) for call in range(calls)]
    return torch.stack([loss.detach().clone() for loss in losses]), kept, net.weight.detach().clone(), told


def compare(function):
    eager, xla = train("CPU", function), train("XLA", function)
    for want, got in zip(eager[:3], xla[:3], strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)
    return [str(warning.message) for warning in xla[3] if warning.category is EagerStepWarning]


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_operation_runs_as_in_eager_pytorch(case):
    (told,) = compare(REFUSED[case])
    assert "lower" in told and __file__.rpartition("/")[2] in told


def test_an_error_of_eager_pytorch_is_raised_at_the_first_call():
    with pytest.raises(RuntimeError, match="LU without pivoting is not implemented on the CPU"):
        train("XLA", lambda h: torch.linalg.lu(h[:2, :2], pivot=False).L, calls=1)


@pytest.mark.parametrize("name", scale.of(LISTED[::6], LISTED))
def test_operations_that_the_sweep_could_not_lower(name):
    op = OPS[name]
    dtype = torch.float32 if torch.float32 in op.dtypes else torch.int64
    samples = list(op.sample_inputs("cpu", dtype))
    for sample in samples[:: max(1, len(samples) // scale.of(1, 4))][: scale.of(1, 4)]:

        def function(h, sample=sample):
            with torch.no_grad():
                return op.op(sample.input, *sample.args, **sample.kwargs)

        compare(function)
