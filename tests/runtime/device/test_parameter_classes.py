"""Parameters of users' own classes: others ask for their class, and call methods that theirs override."""

import pytest
import torch
from torch import nn

import firstloss as fl


class NoDecay(nn.Parameter):
    """A class that only says how a parameter is to be treated."""


class OnSphere(nn.Parameter):
    """A class with an attribute, a method, and one that overrides PyTorch's."""

    def __new__(cls, data, radius=1.0):
        self = torch.Tensor._make_subclass(cls, data, True)
        self.radius = radius
        return self

    def norm(self):
        return super().norm() / self.radius

    def project_(self):
        return self.mul_(self.radius / super().norm())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scale = NoDecay(torch.rand(8))
        self.code = OnSphere(torch.randn(8, 8), 2.0)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.first(x) * self.scale @ self.code)


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, 1e-2, weight_decay=0.3),
    "SGD": lambda groups: torch.optim.SGD(groups, 1e-2, momentum=0.9, weight_decay=0.3),
}


def test_a_constructor_keeps_the_classes():
    torch.manual_seed(0)
    eager, drawn = Net(), torch.rand(3)
    torch.manual_seed(0)
    net = fl.deferred_init(Net)
    assert torch.equal(torch.rand(3), drawn)
    assert [type(p) for p in (net.scale, net.code)] == [NoDecay, OnSphere] and net.code.radius == 2.0
    fl.materialize_module(net)
    assert [type(p) for p in net.parameters()] == [type(p) for p in eager.parameters()]
    for a, e in zip(net.parameters(), eager.parameters(), strict=True):
        assert torch.equal(a, e)


def trained(backend, deferred, optimizer, reads):
    torch.manual_seed(0)
    if deferred:
        net = fl.deferred_init(Net)
    else:
        with backend.device:
            net = Net()
    called = fl.compile(net, backend)
    special = [p for p in net.parameters() if isinstance(p, NoDecay)]
    others = [p for p in net.parameters() if not isinstance(p, NoDecay)]
    assert len(special) == 1
    optimizer = OPTIMIZERS[optimizer]([{"params": special, "weight_decay": 0.0}, {"params": others}])

    def step(x):
        loss = called(x).square().mean() + 0.1 * net.code.norm()
        loss.backward()
        if reads:  # so its Python runs at each call
            loss = loss + 0 * x[x.sum(1) * loss.detach() > -1e9].sum()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in net.parameters():
                if isinstance(p, OnSphere):
                    p.project_()
        return loss

    step = fl.trace(step) if backend.is_xla else step
    draws = torch.Generator().manual_seed(0)
    losses = [step(torch.randn(4, 8, generator=draws)).item() for _ in range(5)]
    return losses, [p.detach().clone() for p in net.parameters()]


@pytest.mark.filterwarnings("ignore::firstloss.errors.EagerStepWarning")
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("deferred", [False, True])
def test_steps_train_as_in_eager(deferred, optimizer, reads, tmp_path):
    expected, weights = trained(fl.backend("CPU"), False, optimizer, reads)
    losses, updated = trained(fl.backend("XLA", artifact_dir=tmp_path), deferred, optimizer, reads)
    assert losses == pytest.approx(expected, rel=1e-4)  # XLA sums in another order
    for a, e in zip(updated, weights, strict=True):
        assert type(a) is type(e)
        torch.testing.assert_close(a.as_subclass(torch.Tensor), e.as_subclass(torch.Tensor), rtol=1e-4, atol=1e-5)


def test_a_checkpoint_has_them(tmp_path):
    net = {}
    for name in ("first", "second"):
        torch.manual_seed(len(net))
        backend = fl.backend("XLA", artifact_dir=tmp_path)
        with backend.device:
            net[name] = Net()
        fl.compile(net[name], backend)
    fl.save(net["first"].state_dict(), tmp_path / "checkpoint")
    code = net["second"].code
    net["second"].load_state_dict(fl.load(tmp_path / "checkpoint"))
    assert net["second"].code is code and type(code) is OnSphere
    for a, e in zip(net["second"].parameters(), net["first"].parameters(), strict=True):
        assert torch.equal(a, e)
