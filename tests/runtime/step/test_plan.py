"""The arithmetic of plans for any shapes and meshes; plan_cases.py compares with real devices."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from torch import nn

import firstloss as fl
from firstloss.errors import BackendError, TraceError
from firstloss.init import shardings
from firstloss.lower.estimate import local_bytes
from firstloss.lower.work import Sent

AXES = ("dp", "fsdp", "tp")
meshes = st.dictionaries(st.sampled_from(AXES), st.integers(1, 1024), min_size=1)  # JAX counts up to 2**31


@st.composite
def placements(draw):
    """A shape, and a spec that divides it."""
    axes = draw(meshes)
    shape = [draw(st.integers(1, 64)) for _ in range(draw(st.integers(1, 4)))]
    spec = [[] for _ in shape]
    for axis in draw(st.permutations(list(axes))):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            spec[dim].append(axis)
            shape[dim] *= axes[axis]
    return tuple(shape), tuple(map(tuple, spec)), axes


@given(placements(), st.sampled_from([1, 2, 4, 8]))
def test_bytes_per_device_match_jaxs_shards(placement, itemsize):
    shape, spec, axes = placement
    sharding = NamedSharding(AbstractMesh(tuple(axes.values()), tuple(axes)), PartitionSpec(*(e or None for e in spec)))
    result = local_bytes(shape, itemsize, spec, axes)
    assert result == math.prod(sharding.shard_shape(shape)) * itemsize
    copies = math.prod(size for axis, size in axes.items() if not any(axis in entry for entry in spec))
    assert result * math.prod(axes.values()) == math.prod(shape) * itemsize * copies


def ring(kind, parts):
    """Bytes that each device of a ring sends, counted step by step."""
    ways = len(parts)
    around = sum(parts[step] for step in range(ways - 1))  # each step sends one part on
    return {"all-gather": around, "reduce-scatter": around, "all-reduce": 2 * around, "all-to-all": around}[kind]


@given(
    st.sampled_from(["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]),
    st.dictionaries(st.sampled_from(AXES), st.integers(1, 16), min_size=1),
    st.integers(1, 1 << 20),
)
def test_traffic_is_that_of_ring_algorithms(kind, axes, part):
    ways = math.prod(axes.values())
    sent = Sent(kind, tuple(axes), part * ways)
    assert sent.on_link(axes) == pytest.approx(ring(kind, [part] * ways), rel=1e-12)  # floats


class Perceptron(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def planned(folder, model, axes, *batch, optimizer=torch.optim.AdamW, specs=None):
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    backend = fl.backend("XLA", mesh=mesh, artifact_dir=folder, validate_only=True)
    with backend.device:
        module = model()
    if specs:
        fl.shard(module, specs, axes)
    compiled, built = fl.compile(module, backend), optimizer(module.parameters(), lr=0.1)

    @fl.trace
    def step(*batch):
        loss = compiled(*batch).square().sum()
        loss.backward()
        built.step()
        built.zero_grad()
        return loss

    return step.plan(*batch)


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 20).map(lambda n: 64 * n), min_size=2, max_size=4),
    st.dictionaries(st.sampled_from(["dp", "fsdp"]), st.sampled_from([1, 2, 8, 64]), min_size=1),
    st.integers(1, 3),
)
def test_a_perceptrons_plan_matches_formulas(tmp_path_factory, widths, axes, rows):
    devices = math.prod(axes.values())
    batch = rows * devices
    plan = planned(tmp_path_factory.mktemp("plan"), lambda: Perceptron(widths), axes, torch.zeros(batch, widths[0]))
    weights = [a * b for a, b in zip(widths, widths[1:], strict=False)]
    shared = [n // math.prod(shardings_of(axes, a, b)) for n, a, b in zip(weights, widths, widths[1:], strict=False)]
    assert plan.bytes_of("weights") == plan.gradients == 4 * sum(shared)
    assert plan.bytes_of("state") == 8 * sum(shared) + 4 * len(shared)  # two moments, and a step count
    assert plan.bytes_of("batch") == 4 * rows * widths[0]
    # Forward, the weight's gradient and, except for the first layer, the input's.
    assert plan.matmul_flops == 2 * rows * (3 * sum(weights) - weights[0])
    gathered = sum(one.bytes for one in plan.sent() if one.kind == "all-gather")
    cut = [n if share < n else 0 for n, share in zip(weights, shared, strict=True)]
    # Transposed for the forward pass, unchanged for the input's gradient, which the first layer does not need.
    assert gathered == 4 * (2 * sum(cut) - cut[0])
    assert sum(one.bytes for one in plan.sent() if one.kind == "reduce-scatter") == 4 * sum(cut)
    reduced = sum(one.bytes for one in plan.sent() if one.kind == "all-reduce")
    whole = sum(weights) - sum(cut)
    if devices > 1 and all(share in (n, n // devices) for n, share in zip(weights, shared, strict=True)):
        assert reduced == 4 * whole + 4  # and the loss


def shardings_of(axes, *shape):
    """The number of parts into which FSDP's policy splits a weight along each dimension."""
    if math.prod(shape) < 4096:
        return [1]
    spec = shardings.by_default(shape[::-1], axes)
    return [axes[axis] for entry in spec for axis in entry]


def test_planning_has_no_side_effects(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(0)
    with backend.device:
        model = Perceptron([16, 32, 1])
    eager = Perceptron([16, 32, 1])
    compiled, optimizer = fl.compile(model, backend), torch.optim.AdamW(model.parameters(), lr=0.1)
    eager.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(eager.parameters(), lr=0.1)
    calls = []

    @fl.trace
    def step(x):
        calls.append(len(calls))
        loss = compiled(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(4, 16)
    plan = step.plan(x)
    assert calls == [] and not any(optimizer.state.values()) and all(p.grad is None for p in model.parameters())
    assert plan.bytes_of("weights") == 4 * (16 * 32 + 32) and plan.sent() == [] and plan.devices == 1
    for _ in range(3):
        loss = eager(x).square().sum()
        loss.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x), loss, rtol=1.3e-6, atol=0)  # float32 sums in another order: 1.3e-7
    assert step.plan(x).held == plan.held and calls == [0, 1, 2]


def test_replicated_arrays_are_listed_with_reasons(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.big, self.odd, self.small = nn.Linear(512, 512, bias=False), nn.Linear(512, 509), nn.Linear(509, 2)

        def forward(self, x):
            return self.small(self.odd(self.big(x)))

    specs = {"big.weight": ("tp", None)}
    plan = planned(tmp_path, Odd, {"fsdp": 1024, "tp": 2}, torch.zeros(1024, 512), specs=specs)
    why = {one.name: (one.whole, one.why) for one in plan.held if one.role == "weights" and one.why}
    assert why["big.weight"] == (("fsdp",), "its spec does not name fsdp")
    assert why["odd.weight"] == (
        ("fsdp", "tp"),
        "no spec shards it over tp; no dimension of 509 x 512 is divisible by 1024 (fsdp)",
    )
    assert why["small.weight"] == (("fsdp", "tp"), "smaller than 4,096 elements")


def test_seconds_match_a_computation_by_hand(tmp_path):
    plan = planned(tmp_path, lambda: Perceptron([512, 512]), {"fsdp": 8}, torch.zeros(64, 512))
    took = plan.seconds(1e9, {"": 1e6})
    assert took.compute == plan.flops / 1e9
    sent = sum(one.on_link({"fsdp": 8}) for one in plan.sent())
    assert took.links == {"fsdp": pytest.approx(sent / 1e6, rel=1e-15)}  # float64, added in another order
    assert took.apart == pytest.approx(took.compute + sent / 1e6, rel=1e-15)
    assert took.overlapped == pytest.approx(max(took.compute, sent / 1e6), rel=1e-15)  # one segment
    named = plan.seconds(1e9, {"fsdp": 1e3, "": 1e9})
    assert named.links["fsdp"] == pytest.approx(1e3 * took.links["fsdp"], rel=1e-15)


W = 512
F32 = 4
# A step of one argument x of W x W: bytes read and written, operations.
TRAFFIC = {
    "product": (lambda x: x @ x.sin().cos(), F32 * (2 * W * W + 2 * W * W + W * W)),  # x; x again, sin(x); x @ that
    "fused, one after the other": (lambda x: ((x * 2 + 1).relu() - x).exp(), F32 * 2 * W * W),
    "fused with a sum": (lambda x: (x * x).sum(1), F32 * (W * W + W)),
    "part": (lambda x: x[:10] * 2, F32 * 2 * 10 * W),
    "four parts": (lambda x: sum(part.exp() for part in x.chunk(4)), F32 * (W * W + W * W // 4)),
    "repeated": (lambda x: x[0].expand(W, W) + 1, F32 * (W + W * W)),
    "looked up": (lambda x: torch.nn.functional.embedding(torch.arange(20), x), F32 * 2 * 20 * W),
}


BY_ROWS = ("fused, one after the other", "fused with a sum")  # split over the devices, and so are all reads


@pytest.mark.parametrize("name, ways", [*((name, 1) for name in TRAFFIC), *((name, 8) for name in BY_ROWS)])
def test_memory_traffic_matches_a_computation_by_hand(name, ways, tmp_path):
    compute, expected = TRAFFIC[name]
    mesh = AbstractMesh((ways,), ("dp",))
    backend = fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path, validate_only=True)
    with backend.device:
        model = nn.Linear(1, 1)
    fl.compile(model, backend)
    plan = fl.trace(compute).plan(torch.zeros(W, W))
    assert plan.memory_bytes == expected // ways
    assert plan.seconds(1e30, {"": 1e30}, 1e9).memory == plan.memory_bytes / 1e9


def test_a_step_takes_as_long_as_each_kernels_slower_side(tmp_path):
    plan = planned(tmp_path, lambda: Perceptron([512, 512]), {"fsdp": 8}, torch.zeros(64, 512))
    (part,) = plan.parts
    free = plan.seconds(1e9, {"": 1e30})
    assert free.memory == 0 and free.computing == [plan.flops / 1e9]
    slow = plan.seconds(1e30, {"": 1e30}, 1e9)
    # float64, added in another order
    assert slow.overlapped == pytest.approx(slow.memory, rel=1e-15) and slow.memory == plan.memory_bytes / 1e9
    both = plan.seconds(1e9, {"": 1e30}, 1e9)
    assert max(free.overlapped, slow.overlapped) <= both.overlapped <= free.overlapped + slow.overlapped
    by_hand = sum(max(one.flops, one.bytes) for one in part.work.kernels) / 1e9
    assert both.computing == [pytest.approx(by_hand, rel=1e-15)]


def test_an_abstract_mesh_runs_nothing(tmp_path):
    mesh = AbstractMesh((8,), ("fsdp",))
    with pytest.raises(BackendError, match="has no devices to run on. Pass validate_only=True"):
        fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path)
    backend = fl.backend("XLA", mesh=mesh, artifact_dir=tmp_path, validate_only=True)
    with backend.device:
        model = Perceptron([8, 8])
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        return compiled(x).sum()

    with pytest.raises(BackendError, match=r"only planned, as step\.plan\(batch\)"):
        step(torch.zeros(8, 8))


def test_an_eager_backend_has_nothing_to_plan(tmp_path):
    fl.backend("CPU")

    @fl.trace
    def step(x):
        return x

    with pytest.raises(BackendError, match='backend "CPU" compiles nothing'):
        step.plan(torch.zeros(2))


def test_a_step_that_cannot_be_traced_is_an_error(tmp_path):
    fl.backend("XLA", mesh=AbstractMesh((8,), ("fsdp",)), artifact_dir=tmp_path, validate_only=True)

    @fl.trace
    def step(x):
        return x[x > 0]

    with pytest.raises(TraceError, match="test_plan.py"):
        step.plan(torch.zeros(8))


def test_it_prints_as_a_table(tmp_path):
    backend = fl.backend("XLA", mesh=AbstractMesh((8,), ("fsdp",)), artifact_dir=tmp_path, validate_only=True)
    with backend.device:
        model = nn.Linear(1024, 1024, bias=False)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        return compiled(x).sum()

    lines = str(step.plan(torch.zeros(64, 1024))).splitlines()
    assert lines[0] == "each device of fsdp=8, per step"
    rows = {name: text.strip() for name, text in (line.strip().split("  ", 1) for line in lines[1:])}
    assert rows["weights"] == f"{1024 * 1024 * 4 // 8:,} bytes" and rows["batch"] == "32,768 bytes"
    assert rows["computes"].endswith(f"{2 * 8 * 1024 * 1024:,} in products")
    assert rows["all-gather along fsdp"] == f"sends {1024 * 1024 * 4 * 7 // 8:,} bytes"


def test_a_step_that_reads_numbers_is_planned(tmp_path, capsys):
    """As if all arrays were ones: nothing is NaN, and nothing is kept or printed."""
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    call = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = []

    def plain(x):
        loss = call(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def reading(x):
        loss = call(x).square().mean()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        if not loss.isfinite() or math.isnan(loss.item()) or any(g.isnan().any() for g in gradients):
            return loss
        kept.append(loss.item())
        print(loss.item())
        if all(g.isfinite().all() for g in gradients) and max(kept) < 100:
            optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.ones(8, 16)
    expected, plan = fl.trace(plain).plan(x), fl.trace(reading).plan(x)
    for role in ("weights", "state"):
        assert plan.bytes_of(role) == expected.bytes_of(role) > 0
    assert plan.matmul_flops == expected.matmul_flops and plan.flops > expected.flops
    assert not kept and not capsys.readouterr().out and not optimizer.state
    with pytest.raises(fl.errors.ValueReadError, match=r"`x\[x > 0\]`"):
        fl.trace(lambda x: x[x > 0].sum()).plan(x)
    with pytest.raises(fl.errors.ValueReadError, match=r"`x.sum\(\).item\(\)`"):
        fl.trace(lambda x: x.sum().item()).lower(x)
