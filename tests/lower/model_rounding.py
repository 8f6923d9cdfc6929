"""Whether two training steps differ by more than rounding explains.

A gradient passes if it is within 1e-4 of eager's, by norm. Beyond that, how well float32 determines it is measured and
not guessed: eager PyTorch takes the step in float64, and again in float32 from weights some of which are moved
by an ulp. What moves so far that eager's own gradient moves with it (a ReLU's input that is zero but for rounding,
a batch norm over a handful of values) cannot be compared more closely; AS_FAR times that distance is allowed.

AdamW's update is judged apart, because its first step divides each gradient by its own size: where a gradient is
nothing but rounding, its sign decides. So the new weights are compared with what eager's AdamW makes of our gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

CLOSE = 1e-4  # of a tensor's norm
UNCERTAIN = 1e-2
AS_FAR = 4.0  # times the distance by which eager's own result moves: the largest of a few draws, not the largest
DRAWS = 6
EPS = torch.finfo(torch.float32).eps
RATE, BETAS = 1e-3, (0.9, 0.999)  # of AdamW

Tensors = dict[str, torch.Tensor]


class Step(NamedTuple):
    """What a step leaves: its loss, and by name the gradients, the buffers and the weights behind it."""

    loss: float
    gradients: Tensors
    buffers: Tensors
    weights: Tensors

    def measured(self) -> Tensors:
        """What rounding may move."""
        numbers = {f"buffer {name}": b for name, b in self.buffers.items() if b.is_floating_point()}
        return {"loss": torch.tensor([self.loss], dtype=torch.float64), **self.gradients, **numbers}


class Judgement(NamedTuple):
    """The tensor that differs most in proportion to what is allowed, and what is wrong, in words."""

    worst: str
    distance: float  # of the worst, in its norms
    allowed: float
    wrong: dict[str, str]

    def needs_float64(self) -> bool:
        """Whether float32 does not tell."""
        forward = [
            name for name in self.wrong if name == "loss" or name.startswith(("buffer ", "weights of", "gradients of"))
        ]
        return not forward and (self.allowed > UNCERTAIN or 0 < len(self.wrong) and self.distance <= UNCERTAIN)


def judge(ours: Step, eager: Step, again: Callable[[int | None], Step] | None) -> Judgement:
    """Compare two steps. `again(seed)` is eager's step from moved weights; `again(None)`, in float64. Without it
    nothing beyond CLOSE is allowed."""
    wrong = _exactly(ours, eager)
    if wrong:
        return Judgement("", float("inf"), CLOSE, wrong)
    mine, theirs = ours.measured(), eager.measured()
    sizes = {n: float(t.double().norm()) + EPS / CLOSE * _beside(n, eager) or 1.0 for n, t in theirs.items()}
    far = {n: _distance(mine[n], theirs[n]) / sizes[n] for n in theirs}
    allowed = dict.fromkeys(far, CLOSE)
    if max(far.values()) > CLOSE and again is not None:
        for name, distance in _moves(eager, again).items():
            allowed[name] = max(CLOSE, AS_FAR * distance / sizes[name])
    wrong = {n: f"by {d:.1e}, allowed {allowed[n]:.1e}" for n, d in far.items() if not d <= allowed[n]}
    worst = max(far, key=lambda n: far[n] / allowed[n])
    return Judgement(worst, far[worst], allowed[worst], wrong)


def _beside(name: str, step: Step) -> float:
    """The size of what a tensor is computed from, where that is far larger: an ulp of this is no difference. All
    gradients together, for one that is zero but for rounding (of a bias before a batch norm, of a key's before a
    softmax); a channel's deviation for its mean."""
    if name in step.gradients:
        return float(torch.stack([g.double().norm() for g in step.gradients.values()]).norm())
    variance = step.buffers.get(name.removeprefix("buffer ").replace("running_mean", "running_var"))
    return float(variance.double().sqrt().norm()) if name.endswith("running_mean") and variance is not None else 0.0


def _exactly(ours: Step, eager: Step) -> dict[str, str]:
    """What no rounding excuses: which tensors there are, and counts."""
    wrong = {}
    for what in ("gradients", "buffers", "weights"):
        odd = sorted(set(getattr(ours, what)) ^ set(getattr(eager, what)))
        if odd:
            wrong[f"{what} of one side only"] = ", ".join(odd[:3])
    for name, buffer in eager.buffers.items():
        mine = ours.buffers.get(name, buffer)
        if mine.dtype != buffer.dtype or mine.shape != buffer.shape:
            wrong[f"buffer {name}"] = f"is {mine.dtype}{list(mine.shape)}, not {buffer.dtype}{list(buffer.shape)}"
        elif not buffer.is_floating_point() and not torch.equal(mine, buffer):
            wrong[f"buffer {name}"] = "differs"
    return wrong


def _moves(eager: Step, again: Callable[[int | None], Step]) -> dict[str, float]:
    """How far each of eager's results lies from float64's, and from those of moved weights: the largest distance."""
    base, found = eager.measured(), dict.fromkeys(eager.measured(), 0.0)
    for seed in (None, *range(DRAWS)):
        try:
            other = again(seed).measured()
        except (RuntimeError, TypeError, ValueError):
            if seed is None:  # not every model can be made float64
                continue
            raise
        for name in found.keys() & other.keys():
            found[name] = max(found[name], _distance(other[name], base[name]))
    return found


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference, where both are the same infinity or NaN left out."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())


def judge_update(before: Tensors, ours: Step) -> dict[str, str]:
    """Compare our new weights with those that eager's AdamW makes of the old ones and our gradients, by element."""
    wrong = {}
    weights = {name: torch.nn.Parameter(w.clone()) for name, w in before.items()}
    for name, gradient in ours.gradients.items():
        weights[name].grad = gradient.clone()
    torch.optim.AdamW(weights.values(), lr=RATE, betas=BETAS).step()
    # A weight is rounded after its decay and after its update, which is a product of six roundings. A step that is
    # compiled counts in a float32 tensor, as PyTorch's capturable AdamW does; so its 1 - beta is off by what float32
    # rounds beta by, a quarter of EPS, and the update by that over 1 - beta, or half of it behind a square root.
    of_update = 8 + 0.25 / (1 - BETAS[0]) + 0.125 / (1 - BETAS[1])
    for name, weight in weights.items():
        off = (ours.weights[name] - weight.detach()).abs()
        slack = EPS * (2 * before[name].abs() + of_update * RATE)
        if not bool((off <= slack).all()):
            wrong[f"weights {name}"] = f"after AdamW by {float((off / slack).max()):.1f} times their rounding"
    return wrong


def nudge(model: torch.nn.Module, seed: int) -> None:
    """Move a third of the weights up by about an ulp, a third down: as far as sums in another order would be off."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                steps = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + steps * EPS)
