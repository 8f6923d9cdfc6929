"""A step that sets process-wide dtypes and modes: its results, and the settings after each call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.runtime.step.process_settings import ModesLeft, modes

torch.manual_seed(1)
BATCHES = [(torch.randn(6, 8), torch.randn(6, 4)) for _ in range(8)]


@pytest.fixture(autouse=True)
def as_before():
    before = ModesLeft()
    yield
    before.undo()


def both(backend, losses):
    """`losses(trace, compile)`, traced and in eager PyTorch."""
    before = ModesLeft()
    traced = losses(fl.trace, lambda model: fl.compile(model, backend))
    before.undo()
    fl.backend("CPU")
    return traced, losses(lambda step: step, lambda model: model)


SETTERS = {
    "our half dtype": lambda: fl.amp.set_half_dtype("bfloat16"),
    "autocast's dtype": lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "gradients": lambda: torch.set_grad_enabled(False),
}


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize("name", SETTERS)
def test_settings_made_by_a_step_apply_in_it_and_after_each_call(name, again, backend):
    """Whether reset before each call or not: as in eager PyTorch, although a compiled step runs no Python."""
    weight = nn.Parameter(torch.ones(4, 8))

    def look(x):
        with fl.amp.autocast():
            half = x @ x.T
        with torch.autocast("cpu"):
            torchs = x @ x.T
        filled = torch.full((), 1 / 3)
        return half, torchs, F.linear(x, weight), filled

    def dtypes_and_modes(trace, _):
        @trace
        def sets(x):
            before = look(x)
            SETTERS[name]()
            return before, look(x)

        looks, out = trace(look), []
        start = ModesLeft()
        for _ in range(3):
            if again:
                start.undo()
            parts = [*sets(BATCHES[0][0]), looks(BATCHES[0][0])]
            out += [t.dtype for part in parts for t in part]
            out += [*modes(), parts[1][3].item(), parts[2][3].item()]
        start.undo()
        return out

    traced, eager = both(backend, dtypes_and_modes)
    assert traced == eager


def test_a_step_that_fails_sets_nothing(backend):
    @fl.trace(reads="refuse")
    def step(x):
        fl.amp.set_half_dtype("bfloat16")
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return bool(x.sum() > 0)

    before = modes()
    with pytest.raises(fl.errors.ValueReadError):
        step(BATCHES[0][0])
    assert modes() == before


def test_gradients_accumulate_though_a_step_sets_its_half_dtype(backend):
    """The first call and the later ones are then different executables, whose gradients are different tensors."""

    def losses(trace, compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
        compiled = compile(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(x, y):
            fl.amp.set_half_dtype("bfloat16")
            with fl.amp.autocast():
                loss = F.mse_loss(compiled(x), y)
            loss.backward()
            return loss.detach()

        accumulate = trace(backward)

        @trace
        def update(x, y):
            loss = backward(x, y)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        out = []
        for first, second in zip(BATCHES[::2], BATCHES[1::2], strict=True):
            out += [accumulate(*first).item(), *(value.item() for value in update(*second))]
        return out

    traced, eager = both(backend, losses)
    # Sums in another order, some of which round to 8 bits in the other direction.
    assert traced == pytest.approx(eager, rel=2**-8)


def test_another_default_device_is_another_step(backend):
    """Set globally or in a region: the step's factory functions use it."""
    x = torch.ones(2)
    step = fl.trace(lambda x: x * 2 if torch.ones(2).device.type == "cpu" else x * 3)
    values = [step(x)[0].item()]
    torch.set_default_device("meta")
    values.append(step(x)[0].item())
    torch.set_default_device(None)
    values.append(step(x)[0].item())
    with torch.device("meta"):
        values.append(step(x)[0].item())
    values.append(step(x)[0].item())
    assert values == [2.0, 3.0, 2.0, 3.0, 2.0]


def test_a_default_device_set_by_a_step_stays_set(backend):
    step = fl.trace(lambda x: (torch.set_default_device("meta"), x * 2)[1])
    for _ in range(2):
        step(torch.ones(2, device="cpu"))
        assert torch.get_default_device().type == "meta"
        torch.set_default_device(None)
