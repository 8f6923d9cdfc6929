"""Whether two training steps differ by more than rounding explains.

A gradient passes if it is within 1e-4 of eager's, by norm. Beyond that, its float32 accuracy is measured: eager PyTorch
computes the step in float64, and again in float32 from weights some of which are moved by an ulp. If eager's own
gradient moves too (a ReLU's input that is zero up to rounding, a batch norm over a few values), no closer comparison is
possible, and AS_FAR times that distance is allowed.

AdamW's update is judged separately, because its first step divides each gradient by its own size: for a gradient that
is only rounding, the sign decides. So the new weights are compared with the result of eager's AdamW on the compiled
step's gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

CLOSE = 1e-4  # of a tensor's norm
UNCERTAIN = 1e-2
AS_FAR = 4.0  # times the distance by which eager's own result moves, whose largest value a few draws underestimate
DRAWS = 6
EPS = torch.finfo(torch.float32).eps
RATE, BETAS = 1e-3, (0.9, 0.999)  # of AdamW

Tensors = dict[str, torch.Tensor]


class Step(NamedTuple):
    """The results of a step: its loss, and by name the gradients, buffers and new weights."""

    loss: float
    gradients: Tensors
    buffers: Tensors
    weights: Tensors

    def measured(self) -> Tensors:
        """Everything that rounding may change."""
        numbers = {f"buffer {name}": b for name, b in self.buffers.items() if b.is_floating_point()}
        return {"loss": torch.tensor([self.loss], dtype=torch.float64), **self.gradients, **numbers}


class Judgement(NamedTuple):
    """The tensor with the largest ratio of difference to tolerance, and the problem in words."""

    worst: str
    distance: float  # of the worst tensor, relative to its norm
    allowed: float
    wrong: dict[str, str]

    def needs_float64(self) -> bool:
        """Whether float32 is inconclusive."""
        forward = [
            name for name in self.wrong if name == "loss" or name.startswith(("buffer ", "weights of", "gradients of"))
        ]
        return not forward and (self.allowed > UNCERTAIN or 0 < len(self.wrong) and self.distance <= UNCERTAIN)


def judge(compiled: Step, eager: Step, again: Callable[[int | None], Step] | None) -> Judgement:
    """Compare two steps. `again(seed)` is eager's step from moved weights; `again(None)` is in float64. Without it only
    differences up to CLOSE are allowed."""
    wrong = _exactly(compiled, eager)
    if wrong:
        return Judgement("", float("inf"), CLOSE, wrong)
    actual, expected = compiled.measured(), eager.measured()
    sizes = {n: float(t.double().norm()) + EPS / CLOSE * _beside(n, eager) or 1.0 for n, t in expected.items()}
    far = {n: _distance(actual[n], expected[n]) / sizes[n] for n in expected}
    allowed = dict.fromkeys(far, CLOSE)
    if max(far.values()) > CLOSE and again is not None:
        for name, distance in _moves(eager, again).items():
            allowed[name] = max(CLOSE, AS_FAR * distance / sizes[name])
    wrong = {n: f"by {d:.1e}, allowed {allowed[n]:.1e}" for n, d in far.items() if not d <= allowed[n]}
    worst = max(far, key=lambda n: far[n] / allowed[n])
    return Judgement(worst, far[worst], allowed[worst], wrong)


def _beside(name: str, step: Step) -> float:
    """The norm of the values that a tensor is computed from, if far larger: an ulp of these is not a difference. For
    gradients that are zero up to rounding (of a bias before a batch norm, of a key's before a softmax), all gradients
    together; for a mean, the channel's deviation."""
    if name in step.gradients:
        return float(torch.stack([g.double().norm() for g in step.gradients.values()]).norm())
    variance = step.buffers.get(name.removeprefix("buffer ").replace("running_mean", "running_var"))
    return float(variance.double().sqrt().norm()) if name.endswith("running_mean") and variance is not None else 0.0


def _exactly(compiled: Step, eager: Step) -> dict[str, str]:
    """Properties that rounding cannot change: which tensors there are, and counts."""
    wrong = {}
    for what in ("gradients", "buffers", "weights"):
        odd = sorted(set(getattr(compiled, what)) ^ set(getattr(eager, what)))
        if odd:
            wrong[f"{what} of one side only"] = ", ".join(odd[:3])
    for name, buffer in eager.buffers.items():
        actual = compiled.buffers.get(name, buffer)
        if actual.dtype != buffer.dtype or actual.shape != buffer.shape:
            wrong[f"buffer {name}"] = f"is {actual.dtype}{list(actual.shape)}, not {buffer.dtype}{list(buffer.shape)}"
        elif not buffer.is_floating_point() and not torch.equal(actual, buffer):
            wrong[f"buffer {name}"] = "differs"
    return wrong


def _moves(eager: Step, again: Callable[[int | None], Step]) -> dict[str, float]:
    """The largest distance of each of eager's results from those in float64 and from those of moved weights."""
    base, distances = eager.measured(), dict.fromkeys(eager.measured(), 0.0)
    for seed in (None, *range(DRAWS)):
        try:
            other = again(seed).measured()
        except (RuntimeError, TypeError, ValueError):
            if seed is None:  # some models do not support float64
                continue
            raise
        for name in distances.keys() & other.keys():
            distances[name] = max(distances[name], _distance(other[name], base[name]))
    return distances


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference, without elements where both are the same infinity or NaN."""
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, a - b).norm())


def judge_update(before: Tensors, compiled: Step) -> dict[str, str]:
    """Compare new weights with the result of eager's AdamW on the old weights and the same gradients, elementwise."""
    wrong = {}
    weights = {name: torch.nn.Parameter(w.clone()) for name, w in before.items()}
    for name, gradient in compiled.gradients.items():
        weights[name].grad = gradient.clone()
    torch.optim.AdamW(weights.values(), lr=RATE, betas=BETAS).step()
    # A weight is rounded after its decay and after its update, which is a product of six roundings. A compiled step
    # counts in a float32 tensor, like PyTorch's capturable AdamW, so its 1 - beta is off by float32's rounding of beta,
    # a quarter of EPS, and the update by that over 1 - beta, or half of it after the square root.
    of_update = 8 + 0.25 / (1 - BETAS[0]) + 0.125 / (1 - BETAS[1])
    for name, weight in weights.items():
        off = (compiled.weights[name] - weight.detach()).abs()
        slack = EPS * (2 * before[name].abs() + of_update * RATE)
        if not bool((off <= slack).all()):
            wrong[f"weights {name}"] = f"after AdamW by {float((off / slack).max()):.1f} times their rounding"
    return wrong


def nudge(model: torch.nn.Module, seed: int) -> None:
    """Move a third of the weights up by about an ulp, and a third down: as much as sums in another order differ."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                steps = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + steps * EPS)
