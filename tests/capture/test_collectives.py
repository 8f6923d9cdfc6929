"""Collectives of a group of one process in a traced step do what they do in eager PyTorch; others are an error."""

import contextlib
import functools
import sys
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import firstloss as fl
from firstloss.capture import distributed
from firstloss.errors import CaptureError
from tests.compiled_steps import check_runs_eagerly
from tests.init.distributed import on_ranks

X = torch.arange(6.0).reshape(3, 2)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _all_reduce(x):
    x = x * 2
    dist.all_reduce(x)
    return x


def _average(x):
    loss = x.mean()
    work = dist.all_reduce(loss, async_op=True)
    work.wait()
    return loss / dist.get_world_size()


def _all_gather(x):
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x * 3)
    return torch.cat(parts)


def _all_gather_into_tensor(x):
    out = torch.empty_like(x)
    dist.all_gather_into_tensor(out, x + 1)
    return out


def _reduce_scatter(x):
    out = torch.empty_like(x)
    dist.reduce_scatter_tensor(out, x - 1)
    return out


def _broadcast(x):
    x = x.clone()
    dist.broadcast(x, 0)
    dist.barrier()
    return x


def _functional(x):
    import torch.distributed._functional_collectives as functional

    return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + functional.all_gather_tensor(x, 0, dist.group.WORLD)


def _all_to_all(x):
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x * 5)
    return out


COLLECTIVES = [
    _all_reduce, _average, _all_gather, _all_gather_into_tensor, _reduce_scatter, _broadcast, _functional, _all_to_all,
]  # fmt: skip


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda f: f.__name__)
def test_a_group_of_one_process_is_as_eager(collective, group, backend):
    step = fl.trace(collective)
    for i in range(4):
        assert torch.equal(step(X + i), collective(X + i))


def _train(model, wrapped, step_of):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(x, last):
        with contextlib.nullcontext() if last else wrapped.no_sync():
            loss = wrapped(x).square().mean()
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        return loss

    step = step_of(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fl.errors.GraphChangeWarning)
        return torch.stack([step(X + i, i % 2 == 1).detach().clone() for i in range(8)])


def test_distributed_data_parallel_trains_as_eager(group, backend):
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    torch.manual_seed(0)
    with backend.device:
        model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    compiled = DistributedDataParallel(fl.compile(model, backend))
    expected = _train(eager, DistributedDataParallel(eager), lambda step: step)
    # Sums of a few products are added in another order by the compiled step.
    torch.testing.assert_close(_train(model, compiled, fl.trace), expected, rtol=1e-4, atol=1e-5)


def run_two():
    """One of two processes, started by `on_ranks`."""

    def reduced(backend, trace):
        return [trace(_all_reduce)(X) for _ in range(2)]

    check_runs_eagerly(reduced, r"test_collectives.py:\d+: c10d.allreduce_.* among 2 processes.*mesh=")

    def trained(backend, trace):
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        compiled = DistributedDataParallel(fl.compile(model, backend) if backend.is_xla else model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @trace
        def step(x):
            loss = compiled(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        losses = [step(X * (dist.get_rank() + 1 + i)) for i in range(7)]  # the last few without a trace
        return losses, [p.detach().clone() for p in model.parameters()]

    # The gradients' products are summed in another order in the first call, which computes them once more.
    check_runs_eagerly(trained, "DistributedDataParallel of 2 processes", rtol=1e-5, atol=1e-6)
    assert torch.equal(_all_reduce(X), X * 4)  # outside of a step nothing has changed


@pytest.mark.timeout(0)  # `on_ranks` has a time limit of its own
def test_a_step_of_one_process_among_several_runs_eagerly():
    on_ranks(2, "tests.capture.test_collectives:run_two")


ADVICE = {
    ("deepspeed",): r"firstloss.deferred_init\(Model\); deepspeed.zero.Init\(module=model",
    ("transformers", "deepspeed"): r"TrainingArguments\(deepspeed=...\).* call from_pretrained, before you make them",
}


@pytest.mark.parametrize("callers", ADVICE)
def test_the_advice_for_zero_init_can_be_followed(callers, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.zero.partition_parameters", types.ModuleType("it"))
    call = functools.partial(distributed.refuse, torch.ops.c10d.broadcast_.default)
    for name in reversed(callers):
        scope = {"__name__": f"{name}.module", "call": call}
        exec("def enter(): call()", scope)
        call = scope["enter"]
    with pytest.raises(CaptureError, match=ADVICE[callers]):
        call()
