"""Numbers in the groups of an optimizer that a traced step reads and changes, but that does not step in it."""

import itertools

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import firstloss as fl

SCHEDULES = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
}
CHANGES = {
    "scheduler": lambda group, schedule: schedule.step(),
    "augmented": lambda group, schedule: group.__setitem__("lr", group["lr"] * 0.9),
    "constant": lambda group, schedule: group.__setitem__("lr", 0.05),
    "another number": lambda group, schedule: group.__setitem__("weight_decay", group["weight_decay"] + 0.1),
    "nothing": lambda group, schedule: None,
}


def numbers(backend, schedule, change, reads, steps):
    """What is in the group after each of five calls, and how often the scheduler has stepped."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
    model = fl.compile(net, backend)
    scheduler = SCHEDULES[schedule](optimizer)
    group = optimizer.param_groups[0]

    @fl.trace
    def step(x):
        rate = group["lr"] * 1.0 if reads else 1.0
        loss = model(x).square().mean()
        if steps:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        CHANGES[change](group, scheduler)
        return loss * rate

    found = []
    for _ in range(5):
        step(torch.randn(2, 4))
        found.append((group["lr"], group["weight_decay"]))
    return found, scheduler.last_epoch


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "schedule, change",
    [*((name, "scheduler") for name in SCHEDULES), *(("cosine", name) for name in CHANGES if name != "scheduler")],
)
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_the_group_is_left_as_in_eager_pytorch(schedule, change, reads, steps, by_kernels, tmp_path):
    expected = numbers(fl.backend("CPU"), schedule, change, reads, steps)
    assert numbers(fl.backend("XLA", artifact_dir=tmp_path), schedule, change, reads, steps) == expected


RATES = {"float": 0.1, "tensor": torch.tensor(0.1)}
# When the optimizer steps, by the number of the call.
STEPS = {
    "always": lambda call: True,
    "every other call": lambda call: call % 2,
    "from the third call on": lambda call: call > 1,
}
VALUES = {
    "a loss": lambda loss, calls: 0.1 / (1 + abs(loss.item())),
    "a count": lambda loss, calls: 0.1 / calls[0],
    "a number of both": lambda loss, calls: min(0.1, loss.item()) / calls[0],
}


def set_from_values(backend, rate, steps, value, key, late, learns):
    torch.manual_seed(0)
    net = nn.Linear(4, 3, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATES[rate])
    model, calls, losses = fl.compile(net, backend), [0], []
    group = optimizer.param_groups[0]

    @fl.trace
    def step(x):
        loss = model(x).square().mean()
        if learns:
            loss.backward()
        calls[0] += 1
        if not late:
            optimizer.param_groups[0][key] = VALUES[value](loss, calls)
        if STEPS[steps](calls[0]):
            optimizer.step()
            optimizer.zero_grad()
        if late:
            optimizer.param_groups[0][key] = VALUES[value](loss, calls)
        return loss.detach()

    for _ in range(5):
        losses.append(step(torch.randn(2, 4, dtype=torch.float64)).item())
        losses.append(float(group[key]))
    return losses, type(group[key])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
@pytest.mark.parametrize("value", VALUES)
def test_a_number_that_is_set_to_what_the_step_reads(value, key, late, tmp_path):
    for case in itertools.product(RATES, STEPS, [value], [key], [late], [False, True]):
        expected, kind = set_from_values(fl.backend("CPU"), *case)
        traced = set_from_values(fl.backend("XLA", artifact_dir=tmp_path), *case)
        assert traced == (pytest.approx(expected, rel=1e-9), kind), case  # float64, summed in another order
