"""`weight.data = tensor` in a traced step: views share the same memory afterwards as in eager PyTorch."""

import functools
import itertools

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import EagerStepWarning
from firstloss.runtime.step import compiling
from tests import scale
from tests.compiled_steps import check_runs_eagerly
from tests.fuzz import interpret


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.z = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.z(torch.tanh(self.a(x)))


VIEWERS = {
    "none": lambda w: None,
    "detached": lambda w: w.detach(),
    "rows": lambda w: w.detach()[1:],
    "data": lambda w: w.data.t(),
    "parameter": lambda w: nn.Parameter(w.data),
    "numpy": lambda w: w.detach().numpy(),
    "from_numpy": lambda w: torch.from_numpy(w.detach().numpy())[1:],
}


def scaled(w):
    w.data = w.data * 0.9


def of_a_name(w):
    data = w.data
    w.data = data * 0.9
    data.add_(1)  # the weight's old memory


def edited_later(w):
    new = w.data * 0.9
    part = new[:2]
    w.data = new
    part.mul_(2)
    new.sub_(0.25)


def twice(w):
    w.data = w.data * 0.9
    w.data = w.data + 0.1


def of_zeros(w):
    w.data = torch.zeros_like(w) + w.data.mean()


ASSIGNMENTS = [scaled, of_a_name, edited_later, twice, of_zeros]


def program(backend, assignment, viewer, weights, used, later):
    """Run six steps in which `assignment` gives a weight other memory."""
    torch.manual_seed(0)
    with backend.device:
        net = Net()
    model = fl.compile(net, backend) if weights == "on the backend" else net
    if weights == "real":
        fl.materialize_module(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    seen = [] if later else [VIEWERS[viewer](net.z.weight)]

    @fl.trace
    def step(x):
        loss = model(x).square().mean()
        if used == "read":
            loss = loss + sum(s.sum() for s in seen if isinstance(s, torch.Tensor))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assignment(net.z.weight)
        if used == "edited":
            with torch.no_grad():
                for s in seen:
                    if isinstance(s, torch.Tensor):
                        s.mul_(0.5)
        return loss

    for i in range(6):
        if later and i in (1, 3):
            seen.append(VIEWERS[viewer](net.z.weight))
        yield step(torch.randn(6, 4))
        yield [torch.as_tensor(s).clone() for s in seen if s is not None]
        yield [p.detach().clone() for p in net.parameters()]
        if i == 4 and not later and viewer != "none":
            with torch.no_grad():
                torch.as_tensor(seen[0]).add_(0.5)  # by now separate memory


WEIGHTS = ["on the backend", "deferred", "real"]
CASES = list(itertools.product(ASSIGNMENTS, VIEWERS, WEIGHTS, ["", "read", "edited"], [False, True]))


@pytest.mark.parametrize("compiled_by_xla", [False, True], ids=["kernels", "xla"])
@pytest.mark.parametrize("part", range(7))
def test_views_keep_their_memory(part, compiled_by_xla, tmp_path, monkeypatch):
    if not compiled_by_xla:  # compilation takes nine tenths of the time
        monkeypatch.setattr(compiling, "compile_step", interpret.interpreted)
    every = 20 if compiled_by_xla else scale.of(5, 1)  # covers each assignment with each viewer
    for setting in CASES[part :: 7 * every]:
        _, viewer, weights, _, later = setting
        eager = list(program(fl.backend("CPU"), *setting))
        traced = program(fl.backend("XLA", artifact_dir=tmp_path), *setting)
        # A real tensor's memory may be held by anyone.
        if weights != "on the backend" and not later and "numpy" in viewer:
            with pytest.warns(EagerStepWarning, match="test_data_assignment.py:.* shares its memory"):
                traced = list(traced)
        for expected, actual in zip(eager, traced, strict=True):
            describe = lambda text, setting=setting: f"{setting}: {text}"  # noqa: E731
            # XLA adds in another order; six steps amplify that.
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5, msg=describe)


def of_outside(net, saved, x):
    net.z.weight.data = saved


def of_another(net, saved, x):
    net.z.bias.data = net.a.bias.data[:3]


def of_an_argument(net, saved, x):
    net.z.weight.data = x


def of_a_part(net, saved, x):
    both = torch.cat([saved, saved]) * 2
    net.z.weight.data = both[:3]
    return both


@pytest.mark.parametrize("assign", [of_outside, of_another, of_an_argument, of_a_part])
def test_outside_memory_matches_eager(assign):
    def run(backend, trace):
        torch.manual_seed(0)
        with backend.device:
            net = Net()
        fl.compile(net, backend)
        saved, x = torch.ones(3, 5), torch.ones(3, 5)
        returned = trace(functools.partial(assign, net, saved))(x)
        with torch.no_grad():
            for tensor in (net.z.weight, net.z.bias, saved, x, *([] if returned is None else [returned])):
                tensor.mul_(3)  # whatever shares its memory is edited, too
        return saved, x, returned, {name: p.detach().clone() for name, p in net.named_parameters()}

    check_runs_eagerly(run, r"test_data_assignment.py:\d+: .*other memory .* `.data = ...`.*clone")
