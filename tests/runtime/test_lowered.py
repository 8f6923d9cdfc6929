"""A lowered step: Python is as before, and JAX computes the same without PyTorch."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss import errors
from firstloss.runtime.exported_step import MODULE

from .. import forked

DOCS = Path(__file__).parents[2] / "docs" / "export.md"


class Net(nn.Module):
    def __init__(self, dropout=0.0, dtype=torch.float32):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, 3).to(dtype)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))).to(self.last.weight.dtype)).float()


def training(tmp_path, name="XLA", dropout=0.0, dtype=torch.float32, schedule=False, **options):
    torch.manual_seed(0)
    backend = fl.backend(name, **({"artifact_dir": tmp_path / "artifacts"} if name == "XLA" else {}), **options)
    with backend.device:
        model = Net(dropout, dtype)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    rate = fl.optim.lr_scheduler.LinearLR(optimizer, 1e-2, 1e-3, total_iters=5) if schedule else None

    @fl.trace
    def step(x, y):
        loss = nn.functional.cross_entropy(compiled(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rate is not None:
            rate.step()
        return loss

    return step, model, optimizer


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)) for _ in range(count)
    ]


def losses_without_torch(path, seed=0):
    """What the code of the page prints, in a process without PyTorch and Firstloss."""
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)[2]
    given, parts = path.with_suffix(".npz"), {}
    for n, (x, y) in enumerate(batches()):
        parts |= {f"x{n}": x.numpy(), f"y{n}": y.numpy()}
    np.savez(given, **parts)
    begin = (
        "import sys\n"
        "sys.modules.update(torch=None, firstloss=None)\n"
        "import numpy as np\n"
        f"given, seed = np.load({str(given)!r}), {seed}\n"
        "batches = [(given[f'x{n}'], given[f'y{n}']) for n in range(4)]\n"
    )
    code = code.replace('"step.safetensors"', repr(str(path)))
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("after", [0, 2])
def test_jax_trains_without_pytorch(schedule, after, tmp_path):
    step, _, _ = training(tmp_path, schedule=schedule)
    for x, y in batches(after):
        step(x, y)
    step.lower(*batches()[0]).save(tmp_path / "step.safetensors")
    losses = [step(x, y).item() for x, y in batches()]
    # As far apart as XLA's sums and those of PyTorch's kernels, which the step calls on a CPU.
    assert losses_without_torch(tmp_path / "step.safetensors") == pytest.approx(losses, rel=1e-5)


LOADED = """
import sys
sys.modules["torch"] = None  # importing it would be an error
import numpy as np
import firstloss as fl
given, step = np.load(sys.argv[2]), fl.load_step(sys.argv[1])
for n in range(4):
    loss, = step(given[f"x{n}"], given[f"y{n}"])
    print(float(loss).hex())
np.savez(sys.argv[2] + ".npz", **{name: np.asarray(array) for name, array in step.state.items()})
"""


def test_a_step_is_loaded_without_pytorch(tmp_path):
    """The bits are those of the compiled module."""
    step, _, _ = training(tmp_path)
    lowered = step.lower(*batches()[0])
    lowered.save(tmp_path / "step.safetensors")
    given = {
        f"{name}{n}": value.numpy() for n, pair in enumerate(batches()) for name, value in zip("xy", pair, strict=True)
    }
    np.savez(tmp_path / "given.npz", **given)
    files = [str(tmp_path / name) for name in ("step.safetensors", "given.npz")]
    done = forked.run(["-c", LOADED, *files], capture_output=True, cwd=forked.ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled, (state, inputs) = lowered.compile(), lowered.arrays()
    losses = []
    for number, batch in enumerate(batches()):
        named = zip(lowered.inputs, inputs, strict=True)
        arrays = [batch[a.argument].numpy() if a.argument is not None else x for a, x in named]
        with jax.enable_x64(True):
            state, (loss,) = compiled(state, arrays, np.array([0, number], np.uint32))
        losses.append(float(loss).hex())
    assert done.stdout.split() == losses
    trained = np.load(files[1] + ".npz")
    assert all(np.array_equal(trained[a.name], array) for a, array in zip(lowered.state, state, strict=True))


def test_a_loaded_step_names_what_is_wrong(tmp_path):
    step, _, _ = training(tmp_path)
    (x, y), path = batches()[0], tmp_path / "step.safetensors"
    step.lower(x, y).save(path, platforms=("cpu", "tpu"))
    loaded = fl.load_step(path)
    assert repr(loaded) == f"<ExportedStep step: {len(loaded.state)} arrays of state, 2 of a batch>"
    with pytest.raises(errors.ShapeError, match="step takes 2 arrays, but was given 1"):
        loaded(x)
    with pytest.raises(errors.ShapeError, match=r"array 0 of the batch is float64\[8, 6\], but .* float32\[8, 6\]"):
        loaded(x.double(), y)
    with pytest.raises(errors.ShapeError, match=r"array 1 .* int64\[7\]"):
        loaded(x, y[1:])
    assert loaded.number == 0 and np.isfinite(loaded(x, y)[0])
    step.lower(x, y).save(tmp_path / "tpu.safetensors", platforms=("tpu",))
    with pytest.raises(errors.CheckpointError, match="no module for cpu, but for tpu"):
        fl.load_step(tmp_path / "tpu.safetensors")
    with pytest.raises(errors.CheckpointMissingError, match="nowhere"):
        fl.load_step(tmp_path / "nowhere")
    fl.save({"weight": torch.ones(3)}, tmp_path / "weights.safetensors")
    with pytest.raises(errors.CheckpointError, match=r"has no step\. Write one with"):
        fl.load_step(tmp_path / "weights.safetensors")


def test_a_damaged_step_is_an_error_or_unharmed(tmp_path):
    """Of 60 files with a byte changed, those that can be loaded have the module as it was written."""
    step, _, _ = training(tmp_path)
    step.lower(*batches()[0]).save(tmp_path / "step.safetensors", platforms=("cpu",))
    whole, generator = (tmp_path / "step.safetensors").read_bytes(), np.random.default_rng(0)
    loaded = 0
    for place in generator.integers(0, len(whole), 60):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(generator.integers(8))
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            fl.load_step(tmp_path / "damaged")
        except errors.CheckpointError as error:
            assert "damaged" in str(error)
        else:
            loaded += 1
    assert loaded < 40
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "damaged").write_bytes(whole[:size])
        with pytest.raises(errors.CheckpointError, match="is damaged"):
            fl.load_step(tmp_path / "damaged")


def test_python_is_as_it_was(tmp_path):
    step, model, optimizer = training(tmp_path)
    before = dict(optimizer.state)
    lowered = step.lower(*batches()[0])
    lowered.as_text()
    lowered.save(tmp_path / "step.safetensors")
    assert dict(optimizer.state) == before == {} and all(p.grad is None for p in model.parameters())
    assert int(model.norm.num_batches_tracked) == 0
    losses = [step(x, y).item() for x, y in batches()]
    (tmp_path / "other").mkdir()
    other, _, _ = training(tmp_path / "other")
    assert losses == [other(x, y).item() for x, y in batches()]


@pytest.mark.parametrize("mesh", [None, {"fsdp": 2}])
def test_it_is_compiled_as_a_whole(mesh, tmp_path):
    """On a mesh in a process of its own, which has two devices."""
    code = f"""
import numpy as np, jax
from tests.runtime.test_lowered import *
jax.config.update("jax_num_cpu_devices", 2)
step, model, _ = training(Path({str(tmp_path)!r}), mesh={mesh})
x, y = batches()[0]
lowered = step.lower(x, y)
compiled = lowered.compile()
before = [weight.clone() for weight in model.parameters()]
new, results = compiled(*lowered.arrays(), np.zeros(2, np.uint32))
assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
analysis = compiled.memory_analysis()
plan = lowered.plan()
held = plan.bytes_of("weights") + plan.bytes_of("state") + plan.bytes_of("batch")
assert 0 <= analysis.argument_size_in_bytes - held <= 64, (analysis, held)  # the seed, the rate, and padding to words
assert analysis.temp_size_in_bytes > 0
np.testing.assert_allclose(float(results[0]), step(x, y).item(), rtol=1e-6)  # XLA's kernels and PyTorch's: rounding
for value, array in zip(new, lowered.state, strict=True):
    if array.name in dict(model.named_parameters()):
        weight = dict(model.named_parameters())[array.name]
        np.testing.assert_allclose(np.asarray(value), weight.detach().numpy(), atol=1e-6)  # updates of 1e-2, rounded
"""
    done = forked.run(["-c", code], capture_output=True, cwd=forked.ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_arrays_are_named(tmp_path):
    step, model, _ = training(tmp_path)
    lowered = step.lower(*batches()[0])
    names = {array.name for array in lowered.state}
    assert names >= {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert names >= {"first.weight.exp_avg", "last.bias.exp_avg_sq", "norm.weight.step"}
    arguments = [(array.name, array.argument, array.shape) for array in lowered.inputs if array.argument is not None]
    assert arguments == [("argument 0", 0, (8, 6)), ("argument 1", 1, (8,))]
    assert [(array.shape, array.dtype) for array in lowered.results] == [((), torch.float32)]
    assert repr(lowered).startswith("<LoweredStep step: ") and "aten.addmm" in str(lowered.program)
    assert str(lowered.plan()) == str(step.plan(*batches()[0]))
    text = lowered.as_text()
    assert "func.func public @main" in text and "stablehlo.dot_general" in text and "custom_call" not in text
    lowered.save(tmp_path / "step.safetensors")
    saved = fl.load(tmp_path / "step.safetensors")
    assert saved[MODULE + "cpu"].dtype == torch.uint8
    assert torch.equal(saved["first.weight"], model.first.weight.detach())
    assert saved["lr0"].dtype == torch.float64 and saved["lr0"].item() == 1e-2


def test_results_may_be_views(tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    with backend.device:
        model = nn.Linear(6, 4)
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(x):
        out = compiled(x)
        return out.t()[1:3], {"loss": out.sum().double()}

    lowered = step.lower(torch.ones(5, 6))
    assert [(array.shape, array.dtype) for array in lowered.results] == [((2, 5), torch.float32), ((), torch.float64)]
    returned = lowered.as_text().partition("@main")[2].partition("return ")[2]
    assert returned.partition(" : ")[2].startswith("tensor<2x5xf32>, tensor<f64>")  # it changes no state


def test_random_operations_follow_the_seed(tmp_path):
    step, _, _ = training(tmp_path, dropout=0.5)
    step.lower(*batches()[0]).save(tmp_path / "step.safetensors")
    first, again, other = (losses_without_torch(tmp_path / "step.safetensors", seed) for seed in (3, 3, 4))
    assert first == again and not set(first) & set(other)


def test_what_cannot_be_lowered(tmp_path):
    step, _, _ = training(tmp_path, "CPU")
    with pytest.raises(errors.BackendError, match="XLA"):
        step.lower(*batches()[0])
    step, model, _ = training(tmp_path)

    @fl.trace
    def raises(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        raises.lower(batches()[0][0])

    @fl.trace
    def reads(x):
        return model(x).sum().item()

    with pytest.raises(errors.TraceError):
        reads.lower(batches()[0][0])
    lowered = step.lower(*batches()[0])
    with pytest.raises(errors.SaveError, match="nowhere.*No such file"):
        lowered.save(tmp_path / "nowhere" / "step.safetensors")
    (tmp_path / "kept.safetensors").write_text("kept")
    with pytest.raises(errors.BackendError, match="abacus"):
        lowered.save(tmp_path / "kept.safetensors", platforms=("abacus",))
    assert (tmp_path / "kept.safetensors").read_text() == "kept"


def test_intermediates_are_what_operations_compute(tmp_path):
    step, model, _ = training(tmp_path, dropout=0.5)
    before = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    (x, y), *_ = batches()
    found = step.lower(x, y).intermediates()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    named = {}
    for each in found:
        named.setdefault(each.operation.split(".")[1], each.value)
        assert each.line.startswith("/") and each.value.device.type == "cpu"
    hidden = torch.addmm(before["first.bias"], x, before["first.weight"].T)
    torch.testing.assert_close(named["addmm"], hidden)  # XLA's products are summed in another order
    loss = step(x, y)  # with the same dropout
    losses = [each.value for each in found if "nll_loss" in each.operation and each.value.dim() == 0]
    torch.testing.assert_close(losses[0], loss.clone())  # of PyTorch's kernels
    assert not torch.equal(model.first.weight, before["first.weight"])
