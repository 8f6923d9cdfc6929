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
from firstloss.cli.check_init import initialize, tensors_of

__all__ = ["add_arguments", "measure"]

NAME = "the meta device's idiom over model zoos"
GOAL = "with Firstloss, no tensor differs from plain construction; check_init finds what others leave unwritten"


@dataclass
class Outcome:
    """The outcome of one architecture.

    `tensors`: how many there are; `meta` and `firstloss` name those that differ. `unwritten`: how many of them the
    script for the meta device leaves unwritten; `not_found` and `false_alarms`: where `fl.check_init` is mistaken.
    """

    zoo: str
    name: str
    tensors: int = 0
    meta: list[str] = field(default_factory=list)
    firstloss: list[str] = field(default_factory=list)
    meta_fails: str = ""
    firstloss_fails: str = ""
    unwritten: int = 0
    not_found: list[str] = field(default_factory=list)
    false_alarms: list[str] = field(default_factory=list)
    left_out: str = ""

    @property
    def is_left_out(self) -> bool:
        return bool(self.left_out)


def script(build: Callable[[], Any], context: Any, finish: Callable[[Any], Any] | None = None) -> dict[str, Any]:
    """Run the script under `context`, or plainly if it is None. Returns the tensors."""
    import torch

    torch.manual_seed(0)
    with context or contextlib.nullcontext():
        model = build()
    if context is not None:
        model.to_empty(device="cpu")
    torch.manual_seed(1)
    initialize(model)
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
    ignored = {key for key, tensor in plain.items() if _holds_nan(tensor)}
    plain = {key: tensor for key, tensor in plain.items() if not _unwritten(tensor)}
    out.tensors = len(plain)
    held: list[Any] = []
    try:
        with fl.check_init("report") as check:
            tensors = script(build, torch.device("meta"), held.append)  # modules that are gone are not examined
        out.meta = differences(plain, tensors)
        expected = {key for key, tensor in tensors.items() if _holds_nan(tensor)} - ignored
        found = {weight.name for weight in check.unwritten} & tensors.keys() - ignored
        out.unwritten = len(expected)
        out.not_found, out.false_alarms = sorted(expected - found), sorted(found - expected)
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


def _holds_nan(tensor: Any) -> bool:
    """Whether some elements hold what uninitialized memory is filled with: NaN, or the largest integer."""
    import torch

    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    return tensor.dtype == torch.int64 and bool((tensor == torch.iinfo(tensor.dtype).max).any())


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
    met = not any(o.firstloss or o.firstloss_fails or o.not_found or o.false_alarms for o in outcomes)
    return harness.Figure(NAME, GOAL, rows, met, {"outcomes": [asdict(outcome) for outcome in outcomes]})


def describe(o: Outcome) -> str:
    """One line on one architecture."""
    if o.left_out:
        return f"{o.zoo:12} {o.name:40} skipped: {o.left_out}"
    meta = o.meta_fails or f"{len(o.meta)} differ{': ' + ', '.join(o.meta[:2]) if o.meta else ''}"
    ours = o.firstloss_fails or f"{len(o.firstloss)} differ{': ' + ', '.join(o.firstloss[:2]) if o.firstloss else ''}"
    wrong = f"; check_init misses {o.not_found}, adds {o.false_alarms}" if o.not_found or o.false_alarms else ""
    return f"{o.zoo:12} {o.name:40} {o.tensors:5} tensors; meta {meta}; Firstloss {ours}{wrong}"


def total(outcomes: list[Outcome]) -> str:
    """The figures of one zoo."""
    work = [o for o in outcomes if not o.meta_fails]
    return (
        f"{len(outcomes)} models, {sum(o.tensors for o in outcomes):,} tensors. Meta: "
        f"{sum(len(o.meta) for o in work):,} tensors differ from plain construction, in "
        f"{sum(bool(o.meta) for o in work)} "
        f"of {len(work)} models; {len(outcomes) - len(work)} models fail. Firstloss: "
        f"{sum(len(o.firstloss) for o in outcomes):,} tensors in {sum(bool(o.firstloss) for o in outcomes)} models; "
        f"{sum(bool(o.firstloss_fails) for o in outcomes)} models fail. check_init: of "
        f"{sum(o.unwritten for o in work):,} unwritten tensors {sum(len(o.not_found) for o in work)} not found, "
        f"{sum(len(o.false_alarms) for o in work)} false alarms"
    )


if __name__ == "__main__":
    harness.main(sys.modules["__main__"])
