"""Initialize the models of three zoos on the meta device and with Firstloss, and compare with plain construction.

    python -m benchmarks.meta_idiom [transformers] [torchvision] [timm] [--limit N] [--only NAME] [--json]

Every architecture of `sweep_constructors` is built three times by the same script: construct (plainly, under
`torch.device("meta")`, or under `fl.deferred()`), `to_empty(device="cpu")` except for the plain one, seed, and call
the model's own initialization: `_init_weights` in transformers, `init_weights()` if a model has it, otherwise
`reset_parameters()` of each module that has it. Then parameters and buffers are compared bit for bit with the plain
ones. Uninitialized memory is filled with NaN, as by `torch.utils.deterministic.fill_uninitialized_memory`, so that it
is never right by chance; tensors that plain construction also leaves uninitialized are not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks import harness
from benchmarks.sweep_constructors import LARGEST, ZOOS, add_arguments, examined, prepare

__all__ = ["add_arguments", "measure"]

NAME = "the meta device's idiom over model zoos"
GOAL = "with Firstloss, no tensor differs from plain construction"


@dataclass
class Outcome:
    """The outcome of one architecture. `tensors`: how many there are; the other fields name those that differ."""

    zoo: str
    name: str
    tensors: int = 0
    meta: list[str] = field(default_factory=list)
    firstloss: list[str] = field(default_factory=list)
    meta_fails: str = ""
    firstloss_fails: str = ""
    left_out: str = ""

    @property
    def is_left_out(self) -> bool:
        return bool(self.left_out)


def initialise(model: Any) -> None:
    """The calls of a script for the meta device after `to_empty`."""
    import torch

    with torch.no_grad():
        if hasattr(model, "_init_weights") and hasattr(model, "config"):
            model.apply(model._init_weights)
        elif callable(getattr(model, "init_weights", None)):
            model.init_weights()
        else:
            for module in model.modules():
                if callable(getattr(module, "reset_parameters", None)):
                    module.reset_parameters()


def tensors_of(model: Any) -> dict[str, Any]:
    """Parameters and buffers by name, including those that are not saved."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def script(build: Callable[[], Any], context: Any, finish: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Run the script under `context`, or plainly if it is None. Returns the tensors."""
    import torch

    torch.manual_seed(0)
    with context or contextlib.nullcontext():
        model = build()
    if context is not None:
        model.to_empty(device="cpu")
    torch.manual_seed(1)
    initialise(model)
    if finish is not None:
        finish(model)
    return tensors_of(model)


def examine(zoo: str, name: str, build: Callable[[], Any], largest: int = LARGEST) -> Outcome:
    """Construct one architecture in three ways."""
    import torch

    import firstloss as fl

    out = Outcome(zoo, name)
    try:
        count = sum(p.numel() for p in fl.deferred_init(build).parameters())
        if count > largest:
            out.left_out = f"{count:,} parameters"
            return out
        plain = script(build, None)
    except Exception as error:
        out.left_out = f"plain construction fails: {_one_line(error)}"
        return out
    plain = {key: tensor for key, tensor in plain.items() if not _unwritten(tensor)}
    out.tensors = len(plain)
    try:
        out.meta = differences(plain, script(build, torch.device("meta")))
    except Exception as error:
        out.meta_fails = _one_line(error)
    try:
        out.firstloss = differences(plain, script(build, fl.deferred(), fl.materialize_module))
    except Exception as error:
        out.firstloss_fails = _one_line(error)
    return out


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """The names of tensors that are not bit-identical to the expected ones."""
    return [name for name, tensor in expected.items() if name not in found or not _same(tensor, found[name])]


def _same(a: Any, b: Any) -> bool:
    import torch

    if a.shape != b.shape or a.dtype != b.dtype or b.is_meta:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _unwritten(tensor: Any) -> bool:
    return bool(tensor.is_floating_point() and tensor.numel() and tensor.isnan().all())


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


def measure(args: argparse.Namespace) -> harness.Figure:
    prepare()
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    outcomes = []
    for zoo in args.zoos or ZOOS:
        for outcome in examined(args, zoo, examine):
            outcomes.append(outcome)
            print(f"  {describe(outcome)}", file=sys.stderr, flush=True)
    torch.use_deterministic_algorithms(False)
    every = (*(args.zoos or ZOOS), "all")
    rows = [(zoo, total([o for o in outcomes if zoo in (o.zoo, "all") and not o.is_left_out])) for zoo in every]
    met = not any(o.firstloss or o.firstloss_fails for o in outcomes)
    return harness.Figure(NAME, GOAL, rows, met, {"outcomes": [asdict(outcome) for outcome in outcomes]})


def describe(o: Outcome) -> str:
    """One line on one architecture."""
    if o.left_out:
        return f"{o.zoo:12} {o.name:40} skipped: {o.left_out}"
    meta = o.meta_fails or f"{len(o.meta)} differ{': ' + ', '.join(o.meta[:2]) if o.meta else ''}"
    ours = o.firstloss_fails or f"{len(o.firstloss)} differ{': ' + ', '.join(o.firstloss[:2]) if o.firstloss else ''}"
    return f"{o.zoo:12} {o.name:40} {o.tensors:5} tensors; meta {meta}; Firstloss {ours}"


def total(outcomes: list[Outcome]) -> str:
    """The figures of one zoo."""
    work = [o for o in outcomes if not o.meta_fails]
    return (
        f"{len(outcomes)} models, {sum(o.tensors for o in outcomes):,} tensors. Meta: "
        f"{sum(len(o.meta) for o in work):,} tensors differ from plain construction, in "
        f"{sum(bool(o.meta) for o in work)} "
        f"of {len(work)} models; {len(outcomes) - len(work)} models fail. Firstloss: "
        f"{sum(len(o.firstloss) for o in outcomes):,} tensors in {sum(bool(o.firstloss) for o in outcomes)} models; "
        f"{sum(bool(o.firstloss_fails) for o in outcomes)} models fail"
    )


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
