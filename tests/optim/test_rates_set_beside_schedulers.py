"""Steps that set a number in a parameter group, and step a PyTorch scheduler that sets it as well."""

import itertools

import pytest
import torch
from torch.optim import lr_scheduler

import firstloss as fl

SCHEDULES = {
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 6),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=20),
}
EDITS = {
    "a factor": lambda group: group.__setitem__("lr", group["lr"] * 0.9),
    "a constant": lambda group: group.__setitem__("lr", 0.05),
    "another number": lambda group: group.__setitem__("weight_decay", group["weight_decay"] + 0.1),
    "nothing": lambda group: None,
}
CASES = list(itertools.product(EDITS, ["first", "before", "after"], [False, True], [0.2, 0.05]))


def train(backend, schedule, edit, when, steps, rate):
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    model, scheduler, group = fl.compile(net, backend), SCHEDULES[schedule](optimizer), optimizer.param_groups[0]

    @fl.trace
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        if when == "first":
            EDITS[edit](group)
        if steps:
            optimizer.step()
            optimizer.zero_grad()
        if when == "before":
            EDITS[edit](group)
        scheduler.step()
        if when == "after":
            EDITS[edit](group)
        return loss.detach()

    results = []
    for i in range(4):
        results += [step(torch.ones(2, 3, dtype=torch.float64) * (i + 1)).item(), group["lr"], group["weight_decay"]]
        if not steps:
            optimizer.zero_grad()
    return results, scheduler.last_epoch


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_numbers_are_those_of_eager_pytorch(schedule, by_kernels, tmp_path):
    for case in CASES:
        expected, epoch = train(fl.backend("CPU"), schedule, *case)
        actual = train(fl.backend("XLA", artifact_dir=tmp_path), schedule, *case)
        assert actual == (pytest.approx(expected, rel=1e-12), epoch), case  # float64, summed in another order
