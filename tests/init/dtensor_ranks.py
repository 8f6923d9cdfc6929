"""The code of each rank in test_dtensor.py: shards of deferred models against slices of eager ones, bit for bit."""

from __future__ import annotations

import copy
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import firstloss as fl
from firstloss.engine import cpu_engine
from tests import tiny_llama
from tests.init.distributed import DEVICE

if dist.is_initialized():  # on a rank, not when pytest collects this module
    cpu_engine._SMALL_BYTES = 0  # these models are small


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Number of rows not divisible by any number of ranks, an edited embedding, weights drawn twice, a buffer."""

    def __init__(self, width=32, hidden=72, rows=83):
        super().__init__()
        self.embedding = nn.Embedding(rows, width, padding_idx=40)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, rows, bias=False)
        self.register_buffer("scale", torch.rand(3))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            self.head.weight.mul_(0.5)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale.sum()


def both(make=Model):
    torch.manual_seed(0)
    eager = make()
    torch.manual_seed(0)
    return eager, fl.deferred_init(make)


class no_collectives:
    """A context in which a collective is an error."""

    NAMES = ("scatter", "broadcast", "all_gather", "all_gather_into_tensor", "all_reduce", "all_to_all")

    def __enter__(self):
        self.real = {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, self.refuse)

    def __exit__(self, *exc):
        for name, function in self.real.items():
            setattr(dist, name, function)

    @staticmethod
    def refuse(*args, **kwargs):
        raise AssertionError("a collective was called")


def assert_slices(deferred, eager):
    """Every parameter and buffer of `deferred` equals the local shard of the one of `eager`."""
    expected = dict([*eager.named_parameters(), *eager.named_buffers()])
    actual = dict([*deferred.named_parameters(), *deferred.named_buffers()])
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        whole = expected[name].detach().to(DEVICE)
        assert tensor.device.type == DEVICE, (name, tensor.device)
        if isinstance(tensor, DTensor):
            local = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
            assert type(tensor.to_local()) is torch.Tensor, type(tensor.to_local())
            assert torch.equal(tensor.to_local().detach(), local), (name, dist.get_rank())
            assert torch.equal(tensor.full_tensor().detach(), whole), name
        else:
            assert torch.equal(tensor.detach(), whole), name


def train(model, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        logits = model(tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer


def tokens():
    return torch.arange(40, device=DEVICE).reshape(2, 20) * 7 % 83


def fsdp():
    eager, deferred = both()
    with no_collectives():
        for block in deferred.blocks:
            fully_shard(block)
        fully_shard(deferred)
        assert fl.is_deferred(deferred)
        optimizer_made_before = torch.optim.SGD(deferred.parameters(), lr=0.1)
        fl.materialize_module(deferred)
        assert not fl.is_deferred(deferred)
    assert all(
        a is b for a, b in zip(optimizer_made_before.param_groups[0]["params"], deferred.parameters(), strict=True)
    )
    assert_slices(deferred, eager)
    expected, _ = train(eager.to(DEVICE), tokens())
    losses, _ = train(deferred, tokens())
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4), (
        losses,
        expected,
    )  # reduced in another order


def one_fill_each():
    """Each shard is part of a single fill, as GPU kernels compute it."""
    from firstloss.gpu.fill_slices import recipe_of

    deferred = fl.deferred_init(lambda: nn.Sequential(nn.Embedding(80, 32), nn.Linear(32, 72, bias=False)))
    fully_shard(deferred)
    for parameter in deferred.parameters():
        recipe = recipe_of(parameter.to_local()._storage.value)
        assert recipe is not None and recipe.wanted.numel == parameter.to_local().numel()


def made_by_kernels():
    """Each rank draws its shards on its GPU: none is copied from the CPU."""
    from firstloss.gpu import weights

    counts, real = [], weights.materialize

    def counted(values, *args, **how):
        values = list(values)
        computed = real(values, *args, **how)
        counts.append((len(computed), sum(value.numel > 0 for value in values)))
        return computed

    weights.materialize = counted
    try:
        deferred = fl.deferred_init(lambda: nn.Sequential(nn.Embedding(80, 32), nn.Linear(32, 72, bias=False)))
        fully_shard(deferred)
        fl.materialize_module(deferred)
    finally:
        weights.materialize = real
    assert counts == [(2, 2)], counts


def fsdp_policies():
    eager, deferred = both()
    fully_shard(deferred, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fl.materialize_module(deferred)
    assert_slices(deferred, eager)
    train(deferred, tokens())

    eager, deferred = both()
    fully_shard(deferred, offload_policy=CPUOffloadPolicy(pin_memory=False))
    fl.materialize_module(deferred)
    assert_slices(deferred, eager)

    eager, deferred = both(lambda: nn.Linear(32, 64, bias=False))
    fully_shard(deferred, shard_placement_fn=lambda parameter: Shard(1))
    fl.materialize_module(deferred)
    assert_slices(deferred, eager)


def hsdp():
    mesh = init_device_mesh(DEVICE, (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    eager, deferred = both()
    with no_collectives():
        fully_shard(deferred, mesh=mesh)
        fl.materialize_module(deferred)
    assert_slices(deferred, eager)
    train(deferred, tokens())


PLAN = {f"blocks.{i}.up": ColwiseParallel() for i in range(2)} | {
    f"blocks.{i}.down": RowwiseParallel() for i in range(2)
}


def tensor_parallel():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    eager, deferred = both()
    with no_collectives():
        parallelize_module(deferred, mesh, PLAN)
        fl.materialize_module(deferred)
    assert_slices(deferred, eager)
    expected, _ = train(eager.to(DEVICE), tokens())
    losses, _ = train(deferred, tokens())
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4)  # reduced in another order


def two_dimensions():
    mesh = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    eager, deferred = both()
    with no_collectives():
        parallelize_module(deferred, mesh["tp"], PLAN)
        for block in deferred.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(deferred, mesh=mesh["dp"])
        fl.materialize_module(deferred)
    kinds = {type(p) for parameter in deferred.parameters() for p in parameter.placements}
    assert _StridedShard in kinds or dist.get_world_size() == 2, kinds
    assert_slices(deferred, eager)
    train(deferred, tokens())


def placements():
    world = dist.get_world_size()
    flat = init_device_mesh(DEVICE, (world,))
    square = init_device_mesh(DEVICE, (world // 2, 2))
    cases = [
        (flat, [Shard(0)]),
        (flat, [Shard(1)]),
        (flat, [Shard(2)]),
        (flat, [Shard(-1)]),
        (flat, [Replicate()]),
        (flat, [_StridedShard(0, split_factor=2)]),
        (flat, [_StridedShard(1, split_factor=3)]),
        (square, [Shard(0), Shard(1)]),
        (square, [Shard(1), Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        (square, [Replicate(), Shard(1)]),
        (square, [Shard(2), Replicate()]),
        (square, [_StridedShard(0, split_factor=2), Shard(0)]),
    ]
    for shape in ((40, 30, 4), (7, 5, 3), (1, 97, 2), (3, 1, 1)):
        for mesh, how in cases:

            def make(shape=shape):
                torch.rand(11)
                return torch.empty(shape).normal_(1, 3).to(torch.bfloat16).mul_(0.25)

            eager, deferred = both(make)
            with no_collectives():
                sharded = distribute_tensor(deferred, mesh, how)
                assert fl.is_deferred(sharded)
                assert fl.materialize_tensor(sharded) is sharded
            expected = distribute_tensor(eager, mesh, how, src_data_rank=None)
            assert torch.equal(sharded.to_local(), expected.to_local()), (shape, how)
            assert sharded.placements == expected.placements and sharded.stride() == expected.stride()


class Titan(nn.Module):
    """A model in torchtitan's style: no values in the constructor, all in `init_weights`, after sharding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(83, 32)
        self.blocks = nn.ModuleList(Block(32, 72) for _ in range(2))
        self.square = nn.Linear(32, 32)
        self.convolution = nn.Conv2d(8, 6, 3)
        self.head = nn.Linear(32, 83, bias=False)
        self.register_buffer("frequencies", torch.empty(16))

    def init_weights(self):
        nn.init.normal_(self.embedding.weight)
        for depth, block in enumerate(self.blocks):
            block.norm.reset_parameters()
            nn.init.trunc_normal_(block.up.weight, std=0.02, a=-0.03, b=0.03)
            nn.init.zeros_(block.up.bias)
            nn.init.trunc_normal_(block.down.weight, std=0.02 / (depth + 1))
        nn.init.orthogonal_(self.square.weight)
        with torch.no_grad():
            self.square.weight.add_(torch.randn_like(self.square.weight), alpha=0.5)
            self.square.bias.uniform_(-1, 1).mul_(3)
        nn.init.dirac_(self.convolution.weight)
        nn.init.xavier_uniform_(self.head.weight)
        self.frequencies = 1.0 / 10000 ** (torch.arange(0, 16) / 16)


def init_after_sharding():
    world = dist.get_world_size()
    square = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "tp"))

    def plain(model):
        fully_shard(model)

    def two_dimensions(model):
        parallelize_module(model, square["tp"], PLAN)
        for block in model.blocks:
            fully_shard(block, mesh=square["dp"])
        fully_shard(model, mesh=square["dp"])

    def replicated(model):
        fully_shard(model, mesh=square)

    for shard in (plain, two_dimensions, replicated):
        torch.manual_seed(0)
        eager = Titan()
        eager.init_weights()
        state = torch.get_rng_state()
        torch.manual_seed(0)
        deferred = fl.deferred_init(Titan)
        with no_collectives():
            shard(deferred)
            deferred.init_weights()
            assert torch.equal(torch.get_rng_state(), state)
            assert fl.is_deferred(deferred)
            fl.materialize_module(deferred)
        assert_slices(deferred, eager)


def initialisers_after_sharding():
    """Each function of `nn.init` gives a deferred DTensor the values of a plain tensor, and a real one PyTorch's."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    calls = [
        lambda t: nn.init.eye_(t),
        lambda t: nn.init.sparse_(t, 0.3),
        lambda t: nn.init.orthogonal_(t, gain=2.0),
        lambda t: nn.init.kaiming_normal_(t, generator=torch.Generator().manual_seed(5)),
        lambda t: nn.init.trunc_normal_(t, a=-1.0, b=1.0),
        lambda t: nn.init.constant_(t, 3.0),
        lambda t: t.exponential_(),
        lambda t: t.bernoulli_(0.25),
        lambda t: t.random_(5, 50),
        lambda t: t.normal_().clamp_(-1, 1).mul_(0.5),
    ]
    for how in (Shard(0), Shard(1), Replicate()):
        for number, call in enumerate(calls):
            eager, deferred = both(lambda: torch.zeros(10, 7))
            sharded = distribute_tensor(deferred, mesh, [how])
            for tensor in (eager, sharded):
                torch.manual_seed(1)
                with torch.no_grad():
                    call(tensor)
                state = torch.get_rng_state()
            fl.materialize_tensor(sharded)
            assert torch.equal(sharded.full_tensor(), eager), (number, how)
            torch.manual_seed(1)
            with torch.no_grad():
                call(eager)
            assert torch.equal(torch.get_rng_state(), state)
    real = distribute_tensor(torch.zeros(8, 7), mesh, [Shard(0)])
    torch.manual_seed(1)
    assert torch.equal(real.normal_().to_local(), torch.randn(8 // dist.get_world_size(), 7, generator=seeded(1)))
    assert torch.equal(torch.rand_like(real).to_local(), real.to_local().uniform_(generator=skipped(1, real)))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def skipped(seed, real):
    generator = seeded(seed)
    torch.empty(real.to_local().shape).normal_(generator=generator)
    return generator


def changes_after_sharding():
    """Changes of a sharded model before materialization: reset, convert, load, copy, tie."""

    def reset(model):
        torch.manual_seed(5)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()  # also of an embedding with an untrained row
        return model

    def edit(model):
        with torch.no_grad():
            model.head.weight.mul_(0.5).add_(1)
        for parameter in model.blocks.parameters():
            parameter.data.normal_(0, 0.5)
        return model

    for change in (reset, edit, lambda model: model.half(), copy.deepcopy):
        eager, deferred = both()
        if change is copy.deepcopy:  # FSDP's modules cannot be copied
            mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
            parallelize_module(deferred, mesh, PLAN)
        else:
            fully_shard(deferred)
        torch.manual_seed(7)
        eager = change(eager)
        torch.manual_seed(7)
        with no_collectives():
            deferred = change(deferred)
            fl.materialize_module(deferred)
        assert_slices(deferred, eager)

    eager, deferred = both()
    loaded = {name: torch.full(tensor.shape, 3.0) for name, tensor in eager.state_dict().items()}
    fully_shard(deferred)
    set_model_state_dict(deferred, dict(loaded), options=StateDictOptions(full_state_dict=True))
    fl.materialize_module(deferred)
    eager.load_state_dict(loaded)
    assert_slices(deferred, eager)


def counter():
    """The counter policy: the same weights on any mesh, and a Shard(0) computes only its own random words."""
    square = init_device_mesh(DEVICE, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))

    def make():
        torch.manual_seed(0)
        with fl.deferred(rng="counter"):
            return Model()

    whole = make()
    fl.materialize_module(whole)
    for shard in (fully_shard, lambda model: parallelize_module(model, square["tp"], PLAN)):
        sharded = make()
        shard(sharded)
        fl.materialize_module(sharded)
        assert_slices(sharded, whole)


def real_tensors_still_travel():
    fl.deferred_init(lambda: torch.rand(3)).detach()  # installs Firstloss's handling of DTensors
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    local = torch.full((8, 3), float(dist.get_rank()))
    kinds = [Shard(0), Replicate()]
    if torch.__version__ >= "2.12":  # earlier versions raise in full_tensor() of a single strided shard
        kinds.append(_StridedShard(0, split_factor=2))
    for how in kinds:
        assert torch.equal(distribute_tensor(local, mesh, [how]).full_tensor(), torch.zeros(8, 3))


def collectives_are_refused():
    from torch.distributed._functional_collectives import all_reduce

    calls = [
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.all_reduce(tensor),
        lambda tensor: dist.all_gather([torch.empty(5), torch.empty(5)], tensor),
        lambda tensor: dist.send(tensor, 1 - dist.get_rank()),
        lambda tensor: all_reduce(tensor, "sum", dist.group.WORLD),
    ]
    with fl.deferred():
        tensor = torch.rand(5)
        for call in calls:
            try:
                call(tensor)
            except fl.errors.CaptureError as error:
                assert "dtensor_ranks.py" in str(error) and "materialize_module" in str(error), error
            else:
                raise AssertionError("nothing was said")
    tensor = fl.deferred_init(lambda: torch.ones(5))
    dist.all_reduce(tensor)  # needs the value if there is no capture
    assert not fl.is_deferred(tensor) and tensor.tolist() == [2.0] * 5
    with fl.deferred():  # real tensors may be communicated meanwhile
        local = fl.materialize_tensor(torch.ones(3))
        dist.all_reduce(local)
    assert local.tolist() == [2.0, 2.0, 2.0]


def nothing_whole():
    """No rank materializes a whole weight, and each draws about as much as its own part."""
    from firstloss.engine.sampler import StreamSampler

    world = dist.get_world_size()
    drawn = 0
    longest = 0
    real = StreamSampler.fill

    def counted(self, name, target, first, second):
        nonlocal drawn, longest
        drawn += target.numel()
        longest = max(longest, target.untyped_storage().nbytes())
        return real(self, name, target, first, second)

    StreamSampler.fill = counted
    torch.manual_seed(0)
    rows, width = 4000, 1024
    weight = fl.deferred_init(lambda: torch.empty(rows, width).normal_())
    sharded = distribute_tensor(weight, init_device_mesh(DEVICE, (world,)), [Shard(0)])
    fl.materialize_tensor(sharded)
    assert drawn <= rows * width // world + 64, drawn
    drawn = longest = 0
    weight = fl.deferred_init(lambda: torch.empty(rows, width).normal_())
    sharded = distribute_tensor(weight, init_device_mesh(DEVICE, (world,)), [Shard(1)])
    fl.materialize_tensor(sharded)
    assert drawn <= rows * width + 64, drawn
    assert longest <= rows * width * 4 / 1.5, longest
    assert sharded.to_local().untyped_storage().nbytes() == rows * width * 4 // world
    # FSDP pads unequal shards; what the constructor drew there is redrawn, so the first draw is dead.
    layer = fl.deferred_init(nn.Linear, width, rows + 1, bias=False)
    fully_shard(layer)
    nn.init.normal_(layer.weight)
    drawn = 0
    fl.materialize_module(layer)
    assert drawn <= (rows // world + 1) * width + 64, drawn


def checkpoint(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def build(seed):
        torch.manual_seed(seed)
        model = fl.deferred_init(Model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model

    model = build(0)
    fl.materialize_module(model)
    _, optimizer = train(model, tokens())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)

    again = build(1)
    fl.materialize_module(again)
    _, other = train(again, tokens())
    weights, state = get_state_dict(again, other)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(again, other, model_state_dict=weights, optim_state_dict=state)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    assert train_on(model, optimizer) == train_on(again, other)


def train_on(model, optimizer):
    loss = model(tokens()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def digest(path):
    """Write a digest of the full weights: the same on any number of ranks."""
    torch.manual_seed(0)
    model = fl.deferred_init(Model)
    fully_shard(model)
    fl.materialize_module(model)
    text = digest_of(model)
    if dist.get_rank() == 0:
        Path(path).write_text(text)


def digest_of(model):
    digest = hashlib.sha256()
    for tensor in model.parameters():
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        digest.update(whole.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def in_any_order():
    eager, deferred = both()
    fully_shard(deferred)
    children = list(deferred.children())
    for child in children if dist.get_rank() % 2 else reversed(children):
        fl.materialize_module(child)
    fl.materialize_module(deferred, num_threads=1 + dist.get_rank())
    assert_slices(deferred, eager)


def llama():
    uneven = {"vocab_size": 501, "intermediate_size": 172}  # the ranks do not divide this
    eager, deferred = both(lambda: tiny_llama.llama(**uneven, tie_word_embeddings=True))
    with no_collectives():
        for layer in deferred.model.layers:
            fully_shard(layer)
        fully_shard(deferred)
        fl.materialize_module(deferred)
    assert_slices(deferred, eager)
    ids = tokens()
    assert torch.equal(deferred(input_ids=ids).logits, eager(input_ids=ids).logits)
    deferred(input_ids=ids, labels=ids).loss.backward()


if __name__ == "__main__":
    sys.exit("run by test_dtensor.py")
