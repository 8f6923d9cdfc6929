"""The code of each rank in test_dtensor.py that compares with PyTorch, whatever Firstloss has been used for before."""

from __future__ import annotations

import sys

import torch

import firstloss as fl


def imported_late() -> None:
    """Let a capture import DTensor."""
    assert "torch.distributed.tensor" not in sys.modules
    with fl.deferred():
        from torch.distributed.tensor import DTensor  # noqa: F401

        _compare()


def imported_before() -> None:
    """Import DTensor before anything is deferred."""
    import torch.distributed.tensor  # noqa: F401

    _compare()


def distributed_before() -> None:
    """Distribute a deferred tensor first."""
    from torch.distributed.tensor import Shard, distribute_tensor

    distribute_tensor(fl.deferred_init(torch.ones, 8, 6), _mesh(), [Shard(0)])
    _compare()


def _compare() -> None:
    _own_shards()
    _real_shards()
    _parts_of_a_deferred_tensor()


def _mesh() -> torch.distributed.DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def _own_shards() -> None:
    """Shards given to `from_local` are drawn by each rank for itself."""
    from torch import nn
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = _mesh()

    def make() -> nn.ParameterList:
        shards = nn.ParameterList()
        for placement in (Shard(0), Shard(1), Replicate()):
            shards.append(nn.Parameter(DTensor.from_local(torch.empty(4, 6), mesh, [placement], run_check=False)))
            nn.init.normal_(shards[-1], std=0.02)
        shards.append(nn.Parameter(torch.rand_like(shards[0])))
        with torch.no_grad():
            shards[0].uniform_(-1, 1).mul_(2)
            nn.init.trunc_normal_(shards[1], a=-0.5, b=1.0)
        return shards

    torch.manual_seed(0)
    with fl.deferred():
        deferred = make()
        state = torch.get_rng_state()
    assert all(fl.is_deferred(shard) for shard in deferred)
    fl.materialize_module(deferred)
    with _eager():
        torch.manual_seed(0)
        eager = make()
        assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(deferred, eager, strict=True):
        assert torch.equal(a.to_local(), b.to_local())


def _real_shards() -> None:
    """A real tensor is sent by rank 0, and its shards are drawn by PyTorch, with the operations that modes see."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, rank = _mesh(), torch.distributed.get_rank()
    with _eager():
        for placement in (Shard(0), Replicate()):
            sent = distribute_tensor(torch.full((8, 6), float(rank)), mesh, [placement])
            assert torch.equal(sent.to_local(), torch.zeros_like(sent.to_local()))
            torch.manual_seed(1)
            drawn = sent.normal_().to_local()
            generator = torch.Generator().manual_seed(1)
            assert torch.equal(drawn, torch.empty(drawn.shape).normal_(generator=generator))
            assert torch.equal(torch.rand_like(sent).to_local(), torch.empty(drawn.shape).uniform_(generator=generator))


def _parts_of_a_deferred_tensor() -> None:
    """Shards of a deferred tensor are drawn as one process would."""
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(fl.deferred_init(torch.empty, 8, 6), _mesh(), [Shard(0)])
    torch.manual_seed(2)
    sharded.normal_()
    fl.materialize_tensor(sharded)
    whole = torch.empty(8, 6).normal_(generator=torch.Generator().manual_seed(2))
    assert torch.equal(sharded.full_tensor(), whole)


def _eager():
    """Without the capture that may be open."""
    return torch.utils._python_dispatch._disable_current_modes()
