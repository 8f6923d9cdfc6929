"""Kept tensors and arguments that get another shape, another tensor's memory or its identity, in a step and between
two: as in eager PyTorch, or refused at the line."""

import random
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.errors import FirstlossError
from tests import scale

STEPS = 7
NAMES = ("k", "q", "r")

# Changes, each of two tensors or of one that the caller holds, in a step or between two.
CHANGES = [
    "at.{a}.data = at.{b}.data",
    "at.{a}.data = at.{b}",
    "at.{a}.data = batch",
    "at.{a}.data = batch[:2]",
    "at.{a}.data = lent",
    "at.{a}.data = lent[1:5]",
    "at.{a}.data = lent[2:6]",
    "at.{a}.data = torch.cat([at.{a}.flatten()[:1], at.{b}.flatten()])[:4] * 0.9",
    "at.{a}.data = at.{a}.data * 0.5",
    "at.{a}.set_(at.{b})",
    "at.{a}.set_(lent[2:6].clone())",
    "at.{a}.resize_(2)",
    "at.{a}.resize_(2, 2)",
    "at.{a}.resize_(6); at.{a}[4:] = 1.0",
    "at.{a}.resize_(6).zero_(); at.{a}.resize_(4)",
    "at.{a}.unsqueeze_(0)",
    "at.{a}.squeeze_(0)",
    "at.{a} = at.{a}.detach().view(2, -1); at.{a}.t_()",
    "torch.utils.swap_tensors(at.{a}, at.{b})",
    "torch.utils.swap_tensors(at.{a}, spare)",
    "at.{a} = at.{b}[:2]",
    "at.{a} = lent[:3]",
    "at.{a} = batch",
    "at.{a}.untyped_storage().resize_(64)",
    "at.{a}.untyped_storage().fill_(0)",
    "at.{a}.share_memory_()",
]
WRITES = ["at.{a}.add_(mean)", "at.{a}.mul_(0.5)", "at.{a}.flatten()[:1].add_(1.0)", "at.{a} = at.{a} * 0.9 + mean"]


def program(seed):
    """The lines that a step runs, and those between two steps, by the number of the step before."""
    rng = random.Random(seed)

    def fill(text):
        return text.format(**dict(zip("ab", rng.sample(NAMES, 2), strict=True)))

    inside = [fill(rng.choice(WRITES)) for _ in range(2)]
    if rng.random() < 0.3:
        inside.insert(rng.randrange(3), fill(rng.choice(CHANGES)))
    between = {rng.randrange(1, STEPS): fill(rng.choice(CHANGES)) for _ in range(rng.choice((1, 1, 2)))}
    return program(seed + 100_000) if crashes(inside, between) else (inside, between)


def crashes(*lines):
    """Whether PyTorch itself crashes."""
    return "share_memory" in str(lines) and "resize" in str(lines)


def run(lines, backend):
    inside, between = lines
    torch.manual_seed(0)
    with backend.device:
        model = nn.Linear(4, 4)
    compiled = fl.compile(model, backend)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.5)
    at = types.SimpleNamespace(**{name: torch.full((4,), float(i + 1)) for i, name in enumerate(NAMES)})
    lent, spare, other = torch.arange(8.0) / 8, torch.full((4,), 0.3), torch.zeros(4)
    others = {"lent": lent, "spare": spare, "torch": torch}
    changes = compile("\n".join(inside), __file__, "exec")

    @fl.trace
    def step(x, batch):
        optimizer.zero_grad()
        out = compiled(x)
        loss = F.mse_loss(out, torch.zeros_like(out))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            exec(changes, {"at": at, "mean": out.detach().mean(), **others, "batch": batch})
            read = sum((n + 1) * tensor.sum() for n, tensor in enumerate((at.k, at.q, at.r, lent, batch)))
        return loss.detach() * read

    results = []
    generator = torch.Generator().manual_seed(1)
    for i in range(STEPS):
        x = torch.randn(3, 4, generator=generator)
        other.copy_(x[0])
        results.append(step(x, other).clone())
        with torch.no_grad():
            exec(between.get(i, "pass"), {"at": at, **others, "batch": other})
        results += [tensor.detach().clone() for tensor in (at.k, at.q, at.r, lent, other)]
    return results


def agree(programs):
    """How many programs do as in eager PyTorch; others raise errors that name this file."""
    agreed = 0
    for lines in programs:
        try:
            expected = run(lines, fl.backend("CPU"))
        except (RuntimeError, IndexError):  # eager PyTorch raises
            continue
        try:
            actual = run(lines, fl.backend("XLA"))
        except FirstlossError as error:
            assert "test_memory_reassignment.py:" in str(error)
            continue
        agreed += 1
        # float32, the same operations; sums in another order differ in the last places
        how = {"rtol": 1e-5, "atol": 1e-5, "msg": lambda text, lines=lines: f"{lines}: {text}"}
        torch.testing.assert_close(actual, expected, **how)
    return agreed


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", range(0, scale.of(90, 160), 10))
def test_reassigned_memory_matches_eager(first, by_kernels):
    assert agree(program(seed) for seed in range(first, first + 10))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES)
def test_memory_reassigned_twice_matches_eager(change, by_kernels):
    """One tensor, between two steps and between two others."""
    first = change.format(a="k", b="q")
    then = [other.format(a="k", b="q") for other in CHANGES[:: scale.of(4, 1)]]
    inside = ["at.k.add_(mean)", "at.q.mul_(0.5)"]
    assert agree((inside, {2: first, 4: second}) for second in then if not crashes(first, second))
