"""Models that were distributed over one process train on a backend as in eager PyTorch; over several it is an error."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import firstloss as fl
from firstloss.errors import BackendError
from tests.init.distributed import on_ranks

X = torch.arange(12.0).reshape(6, 2) / 10


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)
        self.second.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(torch.relu(self.norm(self.first(x)))))


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _shard(model, mesh, **policies):
    fully_shard(model.second, mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def _losses(model, call, optimizer, trace=lambda step: step):
    @trace
    def step(x):
        loss = call(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return torch.stack([step(X + i / 10).detach().clone() for i in range(5)])


def _adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3)


@pytest.mark.parametrize("optimizer_first", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_one_process_trains_as_eager(optimizer_first, deferred, mesh, backend):
    torch.manual_seed(0)
    eager = _shard(Tied(), mesh)
    expected = _losses(eager, eager, _adam(eager))

    torch.manual_seed(0)
    if deferred:
        with backend.device:
            model = Tied()
    else:
        model = Tied()
    _shard(model, mesh)
    optimizer = _adam(model) if optimizer_first else None
    compiled = fl.compile(model, backend)
    losses = _losses(model, compiled, optimizer or _adam(model), fl.trace)
    # Sums of a few products are added in another order by the compiled step.
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert model.head.weight is model.first.weight
    model.unshard()  # as before, without an effect
    model.set_requires_gradient_sync(False)


def test_a_policy_that_would_be_lost_is_an_error_that_leaves_the_model_as_it_is(mesh, backend):
    model = fully_shard(nn.Linear(2, 4), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    before = model(X)
    with pytest.raises(BackendError, match=r"test_fully_sharded.py:\d+: .*MixedPrecisionPolicy.*autocast"):
        fl.compile(model, backend)
    model.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert torch.equal(model(X), before)


def refuse_two():
    """One of two processes, started by `on_ranks`."""
    backend = fl.backend("XLA", artifact_dir=tempfile.mkdtemp())
    model = _shard(Tied(), dist.init_device_mesh("cpu", (2,)))
    with pytest.raises(BackendError, match=r"first.weight is distributed over 2 processes.*mesh="):
        fl.compile(model, backend)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert model(X).shape == (6, 4)


@pytest.mark.timeout(0)  # `on_ranks` has a time limit of its own
def test_several_processes_are_an_error():
    on_ranks(2, "tests.runtime.test_fully_sharded:refuse_two")
