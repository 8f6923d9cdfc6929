"""Numbers in the groups of an optimizer that a traced step reads and changes, but that does not step in it."""

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
