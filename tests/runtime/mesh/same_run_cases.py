"""Steps with `same_run` on meshes of one to eight devices of one CPU, run by test_mesh.py in a separate process."""

import hashlib
import math
import warnings

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.extend.core as jex  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from jax.sharding import PartitionSpec  # noqa: E402
from torch import nn  # noqa: E402

import firstloss as fl  # noqa: E402
from firstloss.errors import BackendError, TraceError  # noqa: E402
from firstloss.lower import logical_shards, shard_passes  # noqa: E402
from tests import compiled_steps  # noqa: E402
from tests.optim.test_scheduler_results import Program  # noqa: E402

MESHES = [{"fsdp": 1}, {"fsdp": 2}, {"data": 4}, {"fsdp": 8}, {"dp": 2, "fsdp": 4}, {"fsdp": 4, "tp": 2}]
STEPS = 4


class Words(nn.Module):
    """Embeddings, normalization over the batch, dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(103, 64)
        self.up = nn.Linear(64, 132)
        self.norm = nn.BatchNorm1d(132)
        self.down = nn.Linear(132, 64)

    def forward(self, tokens):
        x = self.norm(self.up(self.embed(tokens)).transpose(1, 2)).relu()
        return F.dropout(self.down(x.transpose(1, 2)), 0.2, self.training) @ self.embed.weight.T


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(103, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.layers(self.embed(tokens), mask, is_causal=True) @ self.embed.weight.T


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, 2, 1)
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 32, 3, 1, 1, groups=4)
        self.last = nn.Linear(32, 103)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 2)
        return self.last(F.group_norm(self.grouped(x), 4).mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(103, 32)
        self.lstm = nn.LSTM(32, 48, batch_first=True)

    def forward(self, tokens):
        return F.pad(self.lstm(self.embed(tokens))[0], (0, 55))


class Orthogonal(torch.optim.Optimizer):
    """Products of weights in the update, as in Muon."""

    def __init__(self, parameters):
        super().__init__(list(parameters), {"lr": 0.02})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            update = p.grad
            if p.ndim == 2:
                update = update / (update.norm() + 1e-7)
                for _ in range(2):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
            p.sub_(update, alpha=self.param_groups[0]["lr"])


def contrastive(out, target):
    """Each row against each other row of the batch."""
    rows = F.normalize(out.flatten(1)[:, :64], dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-2)


def masked(out, target):
    """The mean over some of the positions, of which each row has others."""
    return F.cross_entropy(out.flatten(0, -2), target.flatten(), ignore_index=3, label_smoothing=0.1)


CASES = {
    "words": (Words, masked, adamw, {}),
    "words, clipped, accumulated": (Words, masked, adamw, {"clip": 0.5, "accumulate": 2}),
    "words in bfloat16": (Words, masked, adamw, {"dtype": torch.bfloat16}),
    "words, autocast": (Words, masked, adamw, {"autocast": True}),
    "words, momentum": (Words, masked, lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, nesterov=True), {}),
    "words, orthogonal": (Words, masked, lambda model: Orthogonal(model.parameters()), {}),
    "words, read": (Words, masked, adamw, {"read": True}),
    "attention": (Attention, masked, adamw, {}),
    "attention in bfloat16": (Attention, masked, adamw, {"dtype": torch.bfloat16, "clip": 1.0}),
    "contrastive": (Attention, contrastive, adamw, {}),
    "images": (Images, masked, adamw, {}),
    "images in bfloat16": (Images, masked, adamw, {"dtype": torch.bfloat16}),
    "recurrent": (Recurrent, masked, adamw, {}),
    "an odd batch": (Words, masked, adamw, {"rows": 12}),
}


def train(case, mesh, folder, same_run=8):
    """The losses of some steps, and a digest of all weights and of the optimizer's state after them."""
    make, loss_of, optimizer_of, options = CASES[case]
    backend = fl.backend("XLA", mesh=mesh, same_run=same_run, artifact_dir=str(folder), first_loss="compiled")
    torch.manual_seed(0)
    with backend.device:
        model = make().to(options.get("dtype", torch.float32))
    if mesh == MESHES[-1] and make is Words:
        fl.shard(model, {"up.weight": ("tp", "fsdp"), "down.bias": ("tp",)})
    compiled = fl.compile(model, backend)
    optimizer = optimizer_of(model)
    seen = []

    @fl.trace
    def step(x, y):
        for part in range(parts := options.get("accumulate", 1)):
            with torch.autocast("cpu", torch.bfloat16, options.get("autocast", False)):
                loss = loss_of(compiled(x[part::parts]), y[part::parts]) / parts
            loss.backward()
        if "clip" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip"])
        if not options.get("read") or loss.item() > 4.7:
            optimizer.step()
        seen.append(1)
        optimizer.zero_grad()
        return loss

    generator = torch.Generator().manual_seed(0)
    losses, rows = [], options.get("rows", 16)
    for _ in range(STEPS):
        y = torch.randint(103, (rows, 8), generator=generator)
        x = y
        if make is Images:
            x, y = torch.randn(rows, 3, 24, 24, generator=generator), y[:, 0]
            x = x.to(options.get("dtype", torch.float32))
        losses.append(step(x, y).item())
    states = [model.state_dict(), *(optimizer.state[p] for p in model.parameters())]
    digest = hashlib.sha256()
    for state in states:
        for tensor in state.values():
            content = fl.materialize_tensor(tensor).detach().contiguous().reshape(-1)
            digest.update(content.view(torch.uint8).numpy().tobytes())
    return losses, digest.hexdigest()


@pytest.mark.parametrize("case", CASES)
def test_any_mesh_gives_the_same_bits(case, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a batch of shape")
        expected = train(case, MESHES[0], tmp_path)
        others, turn = MESHES[1:], list(CASES).index(case)
        for mesh in others if case == "words" else (others[turn % 5], others[(turn + 2) % 5]):
            assert train(case, mesh, tmp_path) == expected, mesh
        plain, digest = train(case, MESHES[0], tmp_path, same_run=None)
    assert np.isfinite(plain).all() and digest != expected[1]
    if CASES[case][0] in (Recurrent, Images):  # those of the others draw, each logical shard numbers of its own
        # Sums are in another order, which training amplifies; half precision rounds each term of a sum.
        assert expected[0] == pytest.approx(plain, rel=2e-2 if "bfloat16" in case else 2e-4)


def test_without_it_meshes_differ(tmp_path):
    one, eight = (train("attention", mesh, tmp_path, same_run=None) for mesh in ({"fsdp": 1}, {"fsdp": 8}))
    assert one[0] != eight[0] and one[0] == pytest.approx(eight[0], rel=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_sums_over_devices_are_one_tree_however_they_are_sharded(data):
    """Each device keeps its shard of the sum over all logical shards, or all of it."""
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=3).filter(lambda s: math.prod(s) <= 8))
    axes = dict(zip("abc", sizes, strict=False))
    names = data.draw(st.permutations(list(axes)))
    cut_at = data.draw(st.integers(0, len(names)))
    spec = (tuple(names[:cut_at]), tuple(names[cut_at : data.draw(st.integers(cut_at, len(names)))]))
    shape = [math.prod(axes[name] for name in dim) * data.draw(st.integers(1, 3)) for dim in spec]
    x = np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)
    fours = (x[::2] + x[1::2]).reshape(2, 2, *shape)
    expected = (fours[0][0] + fours[0][1]) + (fours[1][0] + fours[1][1])
    made = logical_shards.cut(jax.make_jaxpr(lambda x: x.sum(0) * 2)(x), [0], 8)
    placed = logical_shards.place(made, [()], [spec], axes)
    assert bool(placed.reduced) == any(spec)
    mesh = jax.make_mesh(sizes, tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(sizes))
    run = jax.shard_map(
        lambda more, x: shard_passes.run(placed, [x], [()], [spec], axes, more)[0],
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(tuple(axes))),
        out_specs=PartitionSpec(*(dim or None for dim in spec)),
        check_vma=False,
    )
    assert np.array_equal(jax.jit(run)(0, x), 2 * expected)


def exchanges_of(jaxpr):
    """Check that each exchange of devices waits for the one before it; returns how many there are."""
    count, after = 0, {}  # for each variable, the last exchange that it waits for
    for equation in jaxpr.eqns:
        inner = [sub for param in equation.params.values() for sub in jax.tree.leaves(param) if hasattr(sub, "eqns")]
        inner += [
            sub.jaxpr for param in equation.params.values() for sub in jax.tree.leaves(param) if hasattr(sub, "jaxpr")
        ]
        waits = max((after.get(var, 0) for var in equation.invars if not isinstance(var, jex.Literal)), default=0)
        within = sum(map(exchanges_of, inner)) + (equation.primitive.name in ("all_gather", "ppermute"))
        if within:
            assert waits == count, equation
            count = waits = count + 1
        after.update(dict.fromkeys(equation.outvars, waits))
    return count


def test_a_device_is_in_one_exchange_at_a_time():
    """Each takes a thread, of which XLA has one for each device: gathers and sums at once can wait for ever."""

    def step(x, *weights):
        def loss(weights):
            h = x
            for weight in weights:
                h = jax.numpy.tanh(h @ weight) + h
            return (h * h).mean() / (1 + (x > 0).sum()), h

        gradients, h = jax.grad(loss, has_aux=True)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], jax.numpy.sort(h, 0)

    x, weights = np.ones((16, 64), np.float32), [np.ones((64, 64), np.float32)] * 3
    axes, kept = {"a": 2, "b": 2}, (("a", "b"), ())
    made = logical_shards.cut(jax.make_jaxpr(step)(x, *weights), [0, None, None, None], 8)
    ins, outs = [(), kept, kept, kept], [kept, kept, kept, ()]
    placed = logical_shards.place(made, ins, outs, axes)
    mesh = jax.make_mesh((2, 2), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = jax.shard_map(
        lambda more, x, *weights: tuple(shard_passes.run(placed, [x, *weights], ins, outs, axes, more)),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(("a", "b")), *(PartitionSpec(("a", "b")),) * 3),
        out_specs=(*(PartitionSpec(("a", "b")),) * 3, PartitionSpec()),
        check_vma=False,
    )
    (mapped,) = (e for e in jax.make_jaxpr(run)(0, x, *weights).jaxpr.eqns if e.primitive.name == "shard_map")
    assert exchanges_of(mapped.params["jaxpr"]) >= 4


def test_gradients_do_not_wait_for_each_other(tmp_path):
    """Each is added over the devices before the next is computed, so that what they are computed from is freed."""
    backend = fl.backend("XLA", mesh={"fsdp": 8}, same_run=8, artifact_dir=str(tmp_path), first_loss="compiled")
    with backend.device:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(12)))
    optimizer, compiled = torch.optim.SGD(model.parameters(), 0.1), fl.compile(model, backend)

    @fl.trace
    def step(x):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step(torch.randn(8 * 1024, 256))
    (executable,) = compiled_steps.latest(step).executable.executables
    # 12 layers' inputs, gradients and half as much again: 22; 33 if XLA orders the sums.
    assert executable.memory_analysis().temp_size_in_bytes < 28 * 1024 * 256 * 4


def test_the_plan_says_what_it_costs(tmp_path):
    backend = fl.backend("XLA", mesh={"fsdp": 8}, same_run=8, artifact_dir=str(tmp_path))
    with backend.device:
        model = nn.Linear(64, 64)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @fl.trace
    def step(x):
        out = compiled(x)
        out.square().mean().backward()
        optimizer.step()
        return out.sort(0).values

    plan = step.plan(torch.zeros(16, 64))
    assert plan.same_run.shards == 8 and plan.same_run.passes == 1
    # The weight is gathered for one product; of its gradient each device sends all but its shard.
    weight, bias, out = 64 * 64 * 4, 64 * 4, 16 * 64 * 4
    assert plan.same_run.sent == 2 * weight * 7 / 8 + 3 * bias + out * 7 / 8
    assert list(plan.same_run.gathered.values()) == [16 * 64 * 4]
    assert "same_run_cases.py" in str(plan) and "8 logical shards in 1 pass, sends" in str(plan)
    with pytest.raises(BackendError, match="cannot be lowered as one module for a backend with same_run"):
        step.lower(torch.zeros(16, 64)).as_text()


@pytest.mark.parametrize("settings", [{"mesh": {"fsdp": 2}}, {"mesh": {"dp": 2}, "same_run": 2}], ids=["mesh", "same"])
@pytest.mark.parametrize("seed", range(14))
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_steps_read_what_schedulers_have_set(seed, settings, float64):
    program = Program(seed)
    if "user's wrapper" in program.schedulers:
        pytest.skip("its step changes more than numbers at one call, which cannot run by its Python here")
    expected, _ = program.run(fl.backend("CPU"))
    actual, step = program.run(fl.backend("XLA", **settings))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-13)  # float64 sums in another order
    assert compiled_steps.compilations(step) >= 1


def test_meshes_that_do_not_divide_it_are_refused():
    with pytest.raises(BackendError, match=r"the 3 devices .* do not divide the 8 .* Use 1, 2, 4 or 8 devices"):
        fl.backend("XLA", mesh={"fsdp": 3}, same_run=8)
    for wrong in (6, 0, True, "8"):
        with pytest.raises(BackendError, match="a power of two, such as 8"):
            fl.backend("XLA", same_run=wrong)
    with pytest.raises(BackendError, match="same_run has no effect"):
        fl.backend("CPU", same_run=8)


def small_step(tmp_path, used):
    backend = fl.backend("XLA", same_run=8, artifact_dir=str(tmp_path))
    with backend.device:
        model = nn.Linear(4, 3)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        return used(compiled(x), x)

    return step(torch.ones(8, 4))


def test_a_step_that_would_consume_twice_is_refused(tmp_path):
    """Its Python reads a value, which takes a second run, and has taken from a generator."""
    scales = iter([1.0, 0.5, 0.25])
    with pytest.raises(TraceError, match="consumes or changes an? .*, and reads a value"):
        small_step(tmp_path, lambda out, x: out.sum() * next(scales) * (x.sum().item() > 0))


def test_sparse_tensors_are_refused(tmp_path):
    with pytest.raises(TraceError, match=r"same_run_cases.py:\d+: the step computes with a tensor of the layout"):
        small_step(tmp_path, lambda out, x: out.sum() + x.to_sparse().to_dense().mean())
