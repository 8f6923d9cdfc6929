"""Training resumed from a checkpoint has the losses of uninterrupted training, bit for bit."""

import pytest
import torch
from torch import nn

import firstloss as fl
from tests import compiled_steps


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(150, 150)
        self.norm = nn.BatchNorm1d(150)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(150, 10)
        self.last.weight = nn.Parameter(self.last.weight.detach().clone())

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).relu()))


X = torch.randn(6, 16, 150, generator=torch.Generator().manual_seed(1))


class Run:
    """A model, an optimizer, a schedule and a step on a backend of their own."""

    def __init__(self, folder, seed, make=torch.optim.AdamW, lazy=True, **options):
        torch.manual_seed(seed)
        self.backend = fl.backend("XLA", artifact_dir=folder)
        self.backend.device.config.lazy_initialization = lazy
        with self.backend.device:
            self.model = Net()
        compiled = fl.compile(self.model, self.backend)
        self.optimizer = make(self.model.parameters(), lr=0.01, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

        @fl.trace
        def step(x):
            self.optimizer.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            self.optimizer.step()
            return loss

        self.step = step

    def train(self, batches):
        losses = []
        for x in batches:
            losses.append(self.step(x).item())
            self.schedule.step()
        return losses

    def parts(self):
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "backend": self.backend}

    def save(self, path):
        fl.save({name: part.state_dict() for name, part in self.parts().items()}, path)

    def load(self, path):
        state = fl.load(path)
        for name, part in self.parts().items():
            part.load_state_dict(state[name])


@pytest.mark.parametrize(
    "make, options, lazy",
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.SGD, {"momentum": 0.9}, False),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.Adagrad, {}, True),
    ],
)
def test_another_process_resumes(make, options, lazy, tmp_path):
    first = Run(tmp_path, 0, make, lazy, **options)
    expected = first.train(X[:3])
    first.save(tmp_path / "it")
    expected = first.train(X[3:])
    second = Run(tmp_path, 1, make, lazy, **options)
    second.load(tmp_path / "it")
    assert second.train(X[3:]) == expected
    assert len(set(expected)) == 3


def test_the_same_run_can_go_back(tmp_path):
    run = Run(tmp_path, 0)
    run.train(X[:2])
    run.save(tmp_path / "it")
    expected = run.train(X[2:4])
    run.train(X[4:])
    compiled = compiled_steps.latest(run.step).executable
    run.load(tmp_path / "it")
    assert run.train(X[2:4]) == expected
    assert compiled_steps.latest(run.step).executable is compiled  # traced again, and nothing was compiled


def test_saving_does_not_change_training(tmp_path):
    plain = Run(tmp_path, 0).train(X)
    run = Run(tmp_path, 0)
    saving = []
    for x in X:
        saving += run.train([x])
        run.save(tmp_path / "it")
    assert saving == plain


def test_weights_round_trip_through_an_eager_model(tmp_path):
    run = Run(tmp_path, 0)
    run.train(X[:2])
    fl.save(run.model.state_dict(), tmp_path / "w.pt")
    fl.save(run.model.state_dict(), tmp_path / "w.safetensors")
    eager = Net()
    eager.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    for name, tensor in eager.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name].cpu())
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.mul_(2)
    torch.save(eager.state_dict(), tmp_path / "w.pt")
    run.model.load_state_dict(fl.load(tmp_path / "w.pt"))
    assert torch.equal(run.model.first.weight.detach().clone(), eager.first.weight)


def test_tied_weights_of_the_backend_are_stored_once(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
        model[1].weight = model[0].weight
    fl.compile(model, backend)
    fl.save(model.state_dict(), tmp_path / "it")
    (file,) = (tmp_path / "it").glob("*.safetensors")
    assert file.stat().st_size < 200 * 200 * 4 + 16384
    state = fl.load(tmp_path / "it")
    assert torch.equal(state["1.weight"].clone(), model[0].weight.detach().clone())
