"""Cases for a mesh of eight devices on one CPU, run by test_mesh.py in a separate process."""

import ctypes
import os
import signal
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 8)

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402
from firstloss.errors import BackendError, ElsewhereError, ShardingError  # noqa: E402
from firstloss.runtime.mesh import sharded_weights as mesh_placement  # noqa: E402
from firstloss.runtime.mesh.mesh import Mesh  # noqa: E402
from firstloss.runtime.step import functions  # noqa: E402
from tests.runtime.device import test_parameter_classes as parameter_classes  # noqa: E402
from tests.runtime.step import test_first_loss  # noqa: E402

computed, train_a_net = test_first_loss.computed, test_first_loss.run
FIRST_LOSS = {**test_first_loss.OPTIONS, "dropout": {"dropout": 0.2}}

# Sums over a sharded batch or dimension are in another order: a few ulp of float32 per step, amplified by training.
# Measured here: up to 2e-6 of the loss after four steps.
REORDERED = 2e-5

TP = {"up.weight": ("tp", None), "up.bias": ("tp",), "down.weight": (None, "tp")}
WHOLE = {"*": ()}
MESHES = {
    "data parallel": ({"dp": 8}, WHOLE),
    "fsdp": ({"fsdp": 8}, {}),
    "tensor parallel": ({"tp": 8}, {**TP, "*": ()}),
    "fsdp and tensor parallel": ({"fsdp": 2, "tp": 4}, TP),
    "data parallel by default": ({"data": 4}, {}),
    "replicas of fsdp": ({"dp_replicate": 2, "dp_shard": 4}, {"up.weight": ("dp_shard", None)}),
    "two axes on one dimension": ({"dp": 4, "tp": 2}, {"up.weight": (("dp", "tp"), None)}),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(1000, 64)
        self.up = nn.Linear(64, 256)
        self.norm = nn.BatchNorm1d(256)
        self.down = nn.Linear(256, 64)
        self.odd = nn.Parameter(torch.randn(103, 97))  # not divisible
        nn.init.orthogonal_(self.down.weight)
        nn.init.trunc_normal_(self.embed.weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.down(F.dropout(self.norm(self.up(x)).relu(), 0.2, self.training))
        return (x * x).mean(1) + (self.odd.sum() * 1e-3)


class Run:
    def __init__(self, folder, mesh=None, specs=None, make=torch.optim.AdamW, accumulate=1, lazy=True):
        torch.manual_seed(0)
        self.backend = fl.backend("XLA", mesh=mesh, artifact_dir=folder)
        self.backend.device.config.lazy_initialization = lazy
        with self.backend.device:
            self.model = Net()
        if specs:
            fl.shard(self.model, specs)
        compiled = fl.compile(self.model, self.backend)
        self.optimizer = make(self.model.parameters(), lr=0.01)

        @fl.trace
        def step(tokens):
            self.optimizer.zero_grad()
            for part in tokens.chunk(accumulate):
                loss = compiled(part).square().mean()
                (loss / accumulate).backward()
            self.optimizer.step()
            return loss

        self.step = step

    def train(self, begin=0, end=4):
        generator = torch.Generator().manual_seed(7)
        batches = [torch.randint(0, 1000, (16,), generator=generator) for _ in range(end)]
        return [self.step(x).item() for x in batches[begin:]]


def array_of(tensor):
    return tensor._storage.resident.array()


def bytes_of(tensor):
    return tensor.detach().clone().reshape(-1).view(torch.uint8)


def same_bits(a, b):
    return torch.equal(bytes_of(a), bytes_of(b))


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """The losses on one device, and the weights before and after."""
    run = Run(tmp_path_factory.mktemp("one"))
    before = {name: tensor.detach().clone() for name, tensor in run.model.state_dict().items()}
    return run.train(), before


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_gives_the_losses_of_one_device(name, one_device, tmp_path):
    losses, before = one_device
    run = Run(tmp_path, *MESHES[name])
    for key, tensor in run.model.state_dict().items():  # the same bits, wherever they are
        assert same_bits(tensor, before[key]), key
    assert run.train() == pytest.approx(losses, rel=REORDERED)


@pytest.mark.own_compile_cache
def test_a_second_start_lowers_nothing_and_another_mesh_or_sharding_all(tmp_path, monkeypatch):
    lowered = []
    lower = functions.lower_function
    monkeypatch.setattr(functions, "lower_function", lambda name, *args: lowered.append(name) or lower(name, *args))

    def on(mesh, specs=None):
        lowered.clear()
        return Run(tmp_path, mesh, specs or {}).train(), len(lowered)

    def devices(first):
        return jax.sharding.Mesh(np.array(jax.devices()[first : first + 4]), ("fsdp",))

    losses, compiled = on({"fsdp": 4})
    assert compiled
    assert on({"fsdp": 4}) == (losses, 0)
    others = [
        ({"dp": 4}, {}),
        ({"fsdp": 8}, {}),
        ({"fsdp": 2, "tp": 2}, {}),
        ({"tp": 2, "fsdp": 2}, {}),
        ({"fsdp": 4}, {"up.weight": (None, "fsdp")}),
        (devices(4), {}),
    ]
    for mesh, specs in others:
        assert on(mesh, specs) == (pytest.approx(losses, rel=REORDERED), compiled), (mesh, specs)
    assert on(others[-1][0]) == (pytest.approx(losses, rel=REORDERED), 0)


def test_gradient_accumulation(tmp_path):
    expected = Run(tmp_path, accumulate=2).train()
    losses = Run(tmp_path, {"fsdp": 4}, {}, accumulate=2).train()
    assert losses == pytest.approx(expected, rel=REORDERED)


def test_weights_state_and_updates_stay_where_they_are(tmp_path):
    run = Run(tmp_path, {"fsdp": 2, "tp": 4}, TP)
    up, embed = run.model.up.weight, run.model.embed.weight

    def places(tensor):
        shards = array_of(tensor).addressable_shards
        return [(shard.device.id, shard.data.shape, shard.data.unsafe_buffer_pointer()) for shard in shards]

    assert {shape for _, shape, _ in places(up)} == {(64, 64)}
    assert {shape for _, shape, _ in places(embed)} == {(500, 64)}  # the default: the largest dimension, over fsdp
    run.train(0, 1)
    state = [*run.optimizer.state[up].values()][1:]
    assert [array_of(s).sharding for s in state] == [array_of(up).sharding] * 2
    before = [places(up), places(embed), *map(places, state)]
    run.train(1, 2)
    assert [places(up), places(embed), *map(places, state)] == before  # donated: updated in place


@pytest.mark.parametrize("lazy", [True, False])
def test_moved_and_captured_weights_are_placed_alike(lazy, tmp_path):
    run = Run(tmp_path, {"fsdp": 8}, {}, lazy=lazy)
    assert array_of(run.model.embed.weight).addressable_shards[0].data.shape == (125, 64)


@pytest.mark.parametrize("way", ["in place", "sent", "whole"])
@pytest.mark.parametrize("spec", [(), ("a",), (None, "a"), ("a", "b"), (("a", "b"),), (None, ("b", "a"))])
def test_every_part_has_the_bits_of_the_whole(spec, way, tmp_path, monkeypatch):
    """On CPUs shards are computed in the devices' memory, on other devices they are transferred; for a first loss by
    PyTorch's kernels weights are computed whole."""
    monkeypatch.setattr(mesh_placement, "on_cpu", lambda: way != "sent")
    monkeypatch.setattr(mesh_placement, "_CHUNK", 1 << 18)

    def make():
        layer = nn.Linear(96, 640)
        layer.sixteen = nn.Parameter(torch.empty(320, 200, dtype=torch.bfloat16).normal_())
        layer.permuted = nn.Parameter(torch.empty(64, 320).uniform_().t())
        layer.dense = nn.Parameter(nn.init.orthogonal_(torch.empty(160, 120)))
        layer.known = nn.Parameter(torch.tensor(np.arange(16 * 32.0, dtype=np.float32).reshape(16, 32)))
        layer.flat = nn.Parameter(torch.arange(320 * 96.0).reshape(320, 96))
        layer.register_buffer("whole", torch.ones(8, 16))
        return layer

    mesh = {"a": 2, "b": 4}
    torch.manual_seed(3)
    expected = make().state_dict()
    torch.manual_seed(3)
    backend = fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path, first_loss="eager" if way == "whole" else "compiled")
    with backend.device:
        layer = make()
    fl.shard(layer, {name: spec[: tensor.dim()] for name, tensor in expected.items() if tensor.dim() == 2}, mesh)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is a view of memory of shape \\[30720\\], which cannot be sharded")
        fl.compile(layer, backend)
    for name, tensor in layer.state_dict().items():
        assert same_bits(tensor, expected[name]), name
        array = array_of(tensor)  # of the storage
        whole = expected[name].t() if name == "permuted" else expected[name].reshape(array.shape)
        for shard in array.addressable_shards:  # each device, including those with replicas
            part = np.asarray(shard.data).astype(np.float64)
            assert np.array_equal(part, whole.double().numpy()[shard.index]), (name, shard.device)


ON_AXES = {"fsdp": {"fsdp": 8}, "dp and fsdp": {"dp": 2, "fsdp": 4}}
# Each net on one of both meshes, alternating.
ONCE = [(net, [*ON_AXES][n % 2]) for n, net in enumerate(FIRST_LOSS)]


@pytest.mark.parametrize(
    "net, mesh",
    [
        pytest.param(net, mesh, marks=[pytest.mark.sweep] * ((net, mesh) not in ONCE))
        for mesh in ON_AXES
        for net in FIRST_LOSS
    ],
)
def test_the_first_loss_is_that_of_pytorchs_kernels(net, mesh, computed, tmp_path):
    """Bit-identical; training follows the compiled step, as if that had computed the first loss too."""
    options, axes = FIRST_LOSS[net], ON_AXES[mesh]
    name = "XLA" if "dropout" in options else "CPU"  # random numbers are those of the compiled step
    expected, _ = train_a_net(fl.backend(name, artifact_dir=tmp_path), **options)
    computed.clear()
    losses, weights = train_a_net(fl.backend("XLA", mesh=axes, artifact_dir=tmp_path), **options)
    assert computed == [1]
    backend = fl.backend("XLA", mesh=axes, artifact_dir=tmp_path, first_loss="compiled")
    compiled, same = train_a_net(backend, **options)
    assert computed == [1]
    assert torch.equal(losses[0], expected[0])
    assert len(losses) == len(compiled) > 1 and all(map(torch.equal, losses[1:], compiled[1:]))
    assert all(torch.equal(weights[key], same[key]) for key in same)


def test_devices_that_are_not_there_when_they_are_asked_for(tmp_path):
    mesh = Mesh({"fsdp": 64}, put_off=True)
    assert mesh.is_there and mesh.axes == {"fsdp": 64} and mesh.batch_sharding((128,)) is mesh.batch_sharding((64, 2))
    with pytest.raises(BackendError, match=r"mesh_cases.py:\d+.*a mesh of .'fsdp': 64. takes 64 devices"):
        _ = mesh.whole.named


def test_cluster_config(tmp_path):
    config = fl.distributed.ClusterConfig(num_csx=4)
    backend = fl.backend("CSX", cluster_config=config, artifact_dir=tmp_path)
    assert backend.mesh.axes == {"data": 4} and len(backend.mesh.devices.devices.flat) == 4
    assert fl.backend("XLA", cluster_config=fl.distributed.ClusterConfig(), artifact_dir=tmp_path).mesh is None


def test_a_mesh_of_jax(tmp_path):
    devices = np.array(jax.devices()[4:]).reshape(2, 2)
    kinds = (jax.sharding.AxisType.Explicit,) * 2
    run = Run(tmp_path, jax.sharding.Mesh(devices, ("fsdp", "tp"), axis_types=kinds), TP)
    assert {s.device.id for s in array_of(run.model.up.weight).addressable_shards} == {4, 5, 6, 7}
    assert run.train(0, 1)[0] > 0


def test_the_batch_is_cut_or_said_not_to_be(tmp_path):
    run = Run(tmp_path, {"dp": 4, "tp": 2})
    mesh = run.backend.mesh
    assert mesh.batch_sharding((16, 3)).named.spec == jax.sharding.PartitionSpec(("dp",))
    assert mesh.batch_sharding(()).named.is_fully_replicated
    with pytest.warns(UserWarning, match=r"a batch of shape \[6\] cannot be sharded over 4 devices"):
        loss = run.step(torch.arange(6)).item()
    assert loss == pytest.approx(Run(tmp_path).step(torch.arange(6)).item(), rel=REORDERED)


def test_weights_can_be_read_and_edited(tmp_path):
    run = Run(tmp_path, {"fsdp": 8})
    weight = run.model.embed.weight
    expected = weight.detach().clone() * 2
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(weight.detach().clone(), expected) and "Parameter" in repr(weight)
    run.train(0, 1)
    assert array_of(weight).addressable_shards[0].data.shape == (125, 64)


def test_memory_past_the_dispatcher(tmp_path):
    """Arrays and storages are the weights' memory while they are held; addresses are of copies that stay valid."""
    from safetensors.torch import load_file, save_file

    run = Run(tmp_path, {"fsdp": 8}, {})
    run.train(0, 1)
    up = run.model.up.weight
    takes = (np.asarray, lambda t: t.numpy(force=True), torch.from_dlpack, np.from_dlpack)
    for kind in (lambda t: t, lambda t: t.t(), lambda t: t[3:, ::2], lambda t: t[:1, 0], lambda t: t[5]):
        for number, take in enumerate(takes):
            memory = take(kind(up.detach()))
            assert np.array_equal(memory, kind(up).detach().clone())
            memory[...] = number
            assert (kind(up) == number).all()
        with pytest.raises(ElsewhereError, match="copy_"):
            kind(up.detach()).share_memory_()
    array, expected = up.detach().numpy(), up.detach().clone()
    run.train(1, 2)
    assert np.array_equal(array, up.detach().clone()) and not np.array_equal(array, expected)  # as after the step
    array[:] = expected
    assert torch.equal(up.detach().clone(), expected)
    address_before = array.ctypes.data
    run.train(2, 3)
    assert up.detach().numpy().ctypes.data == address_before and not np.array_equal(array, expected)
    del array, memory
    run.train(3, 4)
    assert not up._storage.resident.is_exported  # no step copies it any more
    storage, address = up.untyped_storage(), up.data_ptr()
    run.train(4, 5)
    assert up.data_ptr() == address
    view = torch.empty(0).set_(storage, 0, (256, 64), (64, 1))
    assert torch.equal(view, up.detach().clone())
    storage.fill_(0)
    assert not up.any()
    save_file(run.model.state_dict(), tmp_path / "a.safetensors")
    torch.save(run.model, tmp_path / "a.pt")
    loaded = torch.load(tmp_path / "a.pt", weights_only=False).state_dict()
    for name, value in load_file(tmp_path / "a.safetensors").items():
        assert torch.equal(value, run.model.state_dict()[name].clone()), name
        assert torch.equal(value, loaded[name]), name


def test_a_copy_cannot_be_written(tmp_path):
    """Writing crashes the process, as for a file mapped read-only."""
    run = Run(tmp_path, {"fsdp": 8}, {})
    address = run.model.up.weight.data_ptr()
    child = os.fork()
    if not child:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.memset(address, 0, 4)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_a_loader_on_a_mesh(tmp_path, one_device):
    run = Run(tmp_path, {"dp": 8})
    generator = torch.Generator().manual_seed(7)
    batches = [torch.randint(0, 1000, (16,), generator=generator) for _ in range(4)]
    executor = fl.utils.data.DataExecutor(fl.utils.data.DataLoader(lambda: batches), num_steps=4)
    losses = []
    for batch in executor:
        assert len(array_of(batch).addressable_shards[0].data) == 2
        losses.append(run.step(batch).item())
    assert losses == pytest.approx(one_device[0], rel=REORDERED)


MARKED = [
    ({"up.weight": ("tp",)}, {"tp": 3}, "up.weight: the spec ('tp',) is for a mesh of {'tp': 3}, but the backend's is"),
    ({"up.weight": ("model",)}, {"model": 8}, "up.weight: the spec ('model',) is for a mesh of {'model': 8}"),
    (
        {"up.weight": ("model",)},
        None,
        "up.weight: the spec ('model',) names an axis 'model'. The mesh has 'fsdp', 'tp'",
    ),
]


@pytest.mark.parametrize("specs, mesh, text", MARKED)
def test_marks_for_another_mesh(specs, mesh, text, tmp_path):
    backend = fl.backend("XLA", mesh={"fsdp": 4, "tp": 2}, artifact_dir=tmp_path)
    with backend.device:
        model = Net()
    fl.shard(model, specs, mesh)
    with pytest.raises(ShardingError) as error:
        fl.compile(model, backend)
    assert text in str(error.value) and __file__ in str(error.value)


def test_axes_that_do_not_divide_go_elsewhere_and_are_told(tmp_path):
    backend = fl.backend("XLA", mesh={"fsdp": 4}, artifact_dir=tmp_path)
    layer = nn.Linear(64, 102)
    fl.shard(layer, {"weight": ("fsdp", None)}, {"fsdp": 4})
    with pytest.warns(UserWarning, match="does not divide dimension 0 of 102: it shards dimension 1 instead"):
        fl.compile(layer, backend)
    assert array_of(layer.weight).addressable_shards[0].data.shape == (102, 16)


def test_what_is_no_mesh(tmp_path):
    with pytest.raises(BackendError, match="takes 16 devices, but JAX finds 8"):
        fl.backend("XLA", mesh={"fsdp": 16}, artifact_dir=tmp_path)
    with pytest.raises(ShardingError, match="is not a mesh"):
        fl.backend("XLA", mesh=8, artifact_dir=tmp_path)
    with pytest.raises(BackendError, match="runs on one device"):
        fl.backend("CPU", mesh={"fsdp": 8}, artifact_dir=tmp_path)


@pytest.mark.parametrize("mesh", [None, {"dp": 8}, {"fsdp": 4}])
@pytest.mark.parametrize("trained", [False, True])
def test_a_step_on_another_mesh_than_the_current_backends(mesh, trained, tmp_path):
    run = Run(tmp_path, {"fsdp": 8})
    if trained:
        run.train(0, 1)
    fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path)
    has = "none" if mesh is None else f"one of {mesh}"
    with pytest.raises(BackendError) as error:
        run.train(1, 2)
    assert f"the model's weights are on a mesh of {{'fsdp': 8}}, but the current backend has {has}" in str(error.value)
    assert __file__ in str(error.value)
    fl.backend(run.backend)
    assert np.isfinite(run.train(1, 2)).all()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_parts_are_saved_by_their_owners_and_load_onto_another_mesh(tmp_path):
    first = Run(tmp_path, {"fsdp": 2, "tp": 4}, TP)
    first.train(0, 2)
    parts = {"model": first.model, "optimizer": first.optimizer, "backend": first.backend}
    fl.save({name: part.state_dict() for name, part in parts.items()}, tmp_path / "it")
    (file,) = (tmp_path / "it").glob("*.safetensors")
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        keys = {key for key in tensors.keys() if key.startswith("model.up.weight")}
        assert keys == {f"model.up.weight[{b}:{b + 64}, 0:64]" for b in range(0, 256, 64)}
    expected = first.train(2, 4)
    for mesh, specs in (({"fsdp": 2, "tp": 4}, TP), ({"fsdp": 8}, {}), (None, None)):
        other = Run(tmp_path, mesh, specs)
        saved = fl.load(tmp_path / "it")
        other.model.load_state_dict(saved["model"])
        other.optimizer.load_state_dict(saved["optimizer"])
        other.backend.load_state_dict(saved["backend"])
        losses = other.train(2, 4)
        if mesh == {"fsdp": 2, "tp": 4}:
            assert losses == expected  # bit for bit
            average = other.optimizer.state[other.model.up.weight]["exp_avg"]
            assert array_of(average).addressable_shards[0].data.shape == (64, 64)
        assert losses == pytest.approx(expected, rel=REORDERED)


def test_saving_gathers_nothing(tmp_path, monkeypatch):
    run = Run(tmp_path, {"fsdp": 8})
    run.train(0, 1)
    read = []
    from firstloss.runtime import jax_support

    to_host = jax_support.to_host
    monkeypatch.setattr(jax_support, "to_host", lambda array: (read.append(array.shape), to_host(array))[1])
    fl.save(run.model.state_dict(), tmp_path / "it")
    assert (125, 64) in read and (1000, 64) not in read
    back = fl.load(tmp_path / "it")
    assert same_bits(back["embed.weight"], run.model.embed.weight)


def test_no_warning_by_default(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(tmp_path, {"fsdp": 8}).train(0, 1)


def test_a_lowered_step_has_the_meshs_shardings(tmp_path):
    run = Run(tmp_path, {"fsdp": 8})
    lowered = run.step.lower(torch.arange(16))
    text = lowered.as_text()
    assert "num_partitions = 8" in text and "sharding" in text and "tensor<1000x64xf32>" in text
    with pytest.raises(BackendError, match="one device"):
        lowered.save(tmp_path / "step.safetensors")
    assert not (tmp_path / "step.safetensors").exists()


@pytest.mark.parametrize(
    ("mesh", "parts"), [({"ddp": 8}, 1), ({"dp_replicate": 2, "dp_shard": 4}, 4), ({"replicate": 2, "tp": 4}, 1)]
)
def test_weights_are_whole_on_each_replica(mesh, parts, one_device, tmp_path):
    run = Run(tmp_path, mesh)
    losses = run.train()
    assert losses == pytest.approx(one_device[0], rel=REORDERED)
    shards = {shard.data.shape for shard in array_of(run.model.embed.weight).addressable_shards}
    assert shards == {(1000 // parts, 64)}
    average = array_of(run.optimizer.state[run.model.embed.weight]["exp_avg"])
    assert {shard.data.shape for shard in average.addressable_shards} == {(1000 // parts, 64)}


@pytest.mark.parametrize("optimizer", parameter_classes.OPTIMIZERS)
@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"dp": 2, "fsdp": 2}])
def test_parameters_of_users_own_classes_are_trained(mesh, optimizer, tmp_path):
    expected, weights = parameter_classes.trained(fl.backend("CPU"), False, optimizer, reads=False)
    backend = fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path)
    losses, updated = parameter_classes.trained(backend, False, optimizer, reads=False)
    assert losses == pytest.approx(expected, rel=1e-4)  # sums are in another order
    for a, e in zip(updated, weights, strict=True):
        torch.testing.assert_close(a.as_subclass(torch.Tensor), e.as_subclass(torch.Tensor), rtol=1e-4, atol=1e-5)
