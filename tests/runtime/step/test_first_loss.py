"""The first loss comes from PyTorch's own kernels before anything is compiled; training is unaffected."""

import jax
import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.errors import BackendError
from firstloss.runtime.step import first_loss, segmented
from tests import forked


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, norm=nn.LayerNorm):
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(16, **options) for _ in range(4)])

    def forward(self, x):
        return self.blocks(x)


def run(backend, steps=3, before=lambda net: None, step_of=None, **options):
    """Losses and weights of a few steps."""
    torch.manual_seed(0)
    with backend.device:
        net = Net(**options)
    before(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model = fl.compile(net, backend)

    def train(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = fl.trace(train if step_of is None else step_of(model, optimizer))
    draws = torch.Generator().manual_seed(1)
    losses = [step(*torch.randn(2, 8, 16, generator=draws)).detach().clone() for _ in range(steps)]
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}


def in_bfloat16(model, optimizer):
    """A step with automatic mixed precision."""

    def train(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return train


def small_step(net, backend):
    """A step of SGD."""
    model = fl.compile(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    @fl.trace
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.fixture
def computed(monkeypatch):
    """A list with one item for each loss computed by PyTorch's kernels."""
    losses = []
    compute = first_loss.FirstLoss.compute

    def counted(self, *args):
        results = compute(self, *args)
        losses.append(len(results))
        return results

    monkeypatch.setattr(first_loss.FirstLoss, "compute", counted)
    return losses


def all_equal(a, b):
    return len(a) == len(b) > 0 and all(map(torch.equal, a, b))


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# A batch norm's running averages are updated in the forward pass.
OPTIONS = {"plain": {}, "batch norm": {"norm": nn.BatchNorm1d}, "mixed precision": {"step_of": in_bfloat16}}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_first_loss_is_that_of_eager_pytorch_bit_for_bit(name, computed, tmp_path):
    options = OPTIONS[name]
    eager, _ = run(fl.backend("CPU"), **options)
    first, weights = run(fl.backend("XLA", artifact_dir=tmp_path), **options)
    assert computed == [1]
    compiled, same = run(fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled"), **options)
    assert computed == [1]
    assert torch.equal(first[0], eager[0])
    assert equal(weights, same)
    assert all_equal(first[1:], compiled[1:])
    # XLA sums in another order; a bfloat16 product may round to its neighbour, 2**-8 away
    close = 2**-8 if name == "mixed precision" else 1e-5
    torch.testing.assert_close(compiled[0], eager[0], rtol=close, atol=0)


def test_reads_after_the_loss_see_the_state_after_the_step(computed, tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    one, after_one = run(backend, steps=1)
    compiled, expected = run(fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled"), steps=1)
    assert computed == [1]
    assert equal(after_one, expected)


def test_gradients_that_are_returned_come_from_the_compiled_step(computed, tmp_path):
    def step_of(model, optimizer):
        def step(x, y):
            loss = (model(x) - y).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss + norm

        return step

    run(fl.backend("XLA", artifact_dir=tmp_path), step_of=step_of)
    assert not computed


def loaded(net):
    net.load_state_dict({name: torch.full_like(value, 0.1) for name, value in Net().state_dict().items()})


def edited(net):
    with torch.no_grad():
        net.blocks[0].up.weight.mul_(2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"before": loaded}, []), ({"before": edited}, [1])],
    ids=["weights that were given", "a recipe with an edit"],
)
def test_new_weights_get_their_loss_from_kernels(options, expected, computed, tmp_path):
    first, weights = run(fl.backend("XLA", artifact_dir=tmp_path), **options)
    compiled, same = run(fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled"), **options)
    assert computed == expected
    assert equal(weights, same)
    assert all_equal(first[len(expected) :], compiled[len(expected) :])


def accumulating(model, optimizer):
    def step(x, y):
        total = torch.zeros(())
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            loss = (model(part) - target + 0.1 * torch.randn_like(part)).square().mean()
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


@pytest.mark.parametrize("step_of", [None, accumulating], ids=["one batch", "accumulated over two"])
def test_random_numbers_are_those_of_the_compiled_step(step_of, computed, tmp_path):
    """Dropout masks and noise, each drawn separately."""
    first, weights = run(fl.backend("XLA", artifact_dir=tmp_path), dropout=0.5, step_of=step_of)
    compiled, same = run(fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled"), dropout=0.5, step_of=step_of)
    assert computed == [1]
    torch.testing.assert_close(first[0], compiled[0], rtol=1e-5, atol=0)  # XLA sums in another order
    assert equal(weights, same)
    assert all_equal(first[1:], compiled[1:])


def test_accumulated_gradients_come_from_the_compiled_step(computed, tmp_path):
    """One step accumulates gradients, another uses them: only the first loss of the first comes from kernels."""

    def trained(**options):
        backend = fl.backend("XLA", artifact_dir=tmp_path, **options)
        torch.manual_seed(0)
        with backend.device:
            net = Net()
        optimizer, model = torch.optim.SGD(net.parameters(), lr=0.1), fl.compile(net, backend)

        @fl.trace
        def accumulate(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss

        @fl.trace
        def update():
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for i in range(4):
            losses.append(accumulate(torch.full((4, 16), 0.1 * (i + 1))).item())
            if i % 2:
                update()
        return losses

    first, compiled = trained(), trained(first_loss="compiled")
    assert computed == [1]
    assert first[0] == pytest.approx(compiled[0], rel=1e-5)  # XLA sums in another order
    assert first[1:] == compiled[1:]


def test_only_the_first_step_uses_kernels(computed, tmp_path):
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    run(backend, steps=2)
    run(backend, steps=2)
    assert computed == [1]


def test_an_operation_without_a_kernel_is_compiled(monkeypatch, tmp_path):
    def refuse(self, *args):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(first_loss.FirstLoss, "compute", refuse)
    first, weights = run(fl.backend("XLA", artifact_dir=tmp_path))
    compiled, same = run(fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled"))
    assert equal(weights, same)
    assert all_equal(first, compiled)


def test_an_interrupt_leaves_the_state_unchanged(monkeypatch, tmp_path):
    """The weights are those before the step, and training continues."""
    compute = first_loss.FirstLoss.compute
    interrupts = [KeyboardInterrupt()]

    def interrupted(self, *args):
        if interrupts:
            raise interrupts.pop()
        return compute(self, *args)

    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(0)
    with backend.device:
        net = Net()
    expected = {name: value.detach().clone() for name, value in net.state_dict().items()}
    torch.manual_seed(0)
    with backend.device:
        net = Net()
    step = small_step(net, backend)
    monkeypatch.setattr(first_loss.FirstLoss, "compute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(8, 16))
    assert equal({name: value.detach().clone() for name, value in net.state_dict().items()}, expected)
    assert step(torch.ones(8, 16)).item() > step(torch.ones(8, 16)).item()


def test_a_step_that_fails_after_its_loss_leaves_the_state(monkeypatch, tmp_path):
    finish = segmented.SegmentedRun._prepare_rest
    failures = [RuntimeError("no memory left")]

    def fail(self):
        if failures:
            raise failures.pop()
        finish(self)

    monkeypatch.setattr(segmented.SegmentedRun, "_prepare_rest", fail)
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(0)
    with backend.device:
        net = Net()
    step = small_step(net, backend)
    first = step(torch.ones(8, 16)).item()
    with pytest.raises(RuntimeError, match="no memory left"):
        net.blocks[0].up.weight.sum().item()
    again = step(torch.ones(8, 16)).item()  # the same step: nothing has changed
    assert again == pytest.approx(first, rel=1e-5)  # XLA sums in another order
    assert step(torch.ones(8, 16)).item() < again


@pytest.mark.parametrize("returned", ["number", "several", "large"])
def test_only_the_step_is_compiled(returned, backend, monkeypatch):
    """Inputs and results of the kernels are copied without JAX operations, each of which would be compiled."""
    from jax._src import compiler

    jax.clear_caches()  # the cached note is wrong: the error is raised later
    compile_or_get, names = compiler.compile_or_get_cached, []

    def noted(client, computation, *rest, **options):
        names.append(computation.operation.attributes["sym_name"].value)
        return compile_or_get(client, computation, *rest, **options)

    monkeypatch.setattr(compiler, "compile_or_get_cached", noted)

    def step_of(model, optimizer):
        def step(x, y):
            logits = model(x)
            loss = (logits - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            wide = logits.repeat(64, 64) if returned == "large" else logits.sum(0).bfloat16()
            return loss if returned == "number" else (loss, logits, wide, logits.argmax(1))

        return lambda x, y: step(x, y) if returned == "number" else step(x, y)[0]

    run(backend, steps=1, step_of=step_of, norm=nn.BatchNorm1d)
    assert names and {name.rpartition("_")[0] for name in names} == {"jit__lambda_"}, names


def test_an_unknown_mode_is_refused(tmp_path):
    with pytest.raises(BackendError, match="first_loss='soon': write 'eager' or 'compiled'"):
        fl.backend("XLA", artifact_dir=tmp_path, first_loss="soon")
    with pytest.raises(BackendError, match="first_loss has no effect"):
        fl.backend("CPU", first_loss="eager")


def test_the_process_exits_cleanly_while_a_step_runs(tmp_path):
    """Its results are alive until the very end; the device's threads must not run after their code is freed."""
    script = f"""
import torch
from torch import nn
import firstloss as fl
backend = fl.backend("XLA", artifact_dir={str(tmp_path)!r})
with backend.device:
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
model = fl.compile(net, backend)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
@fl.trace
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
for _ in range(3):
    loss = step(torch.randn(1024, 1024))
"""
    done = forked.run(["-c", script], capture_output=True, timeout=300)
    assert (done.returncode, forked.without_leaks(done.stderr)) == (0, "")
