"""A plan printed as tables."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from . import output

if TYPE_CHECKING:
    from rich.table import Table

    from ..runtime.step.plan import PlannedPart, Seconds, StepPlan

MEMORY = {
    "weights": "weights",
    "state": "optimizer state",
    "gradients": "gradients held at the peak",
    "activations": "activations, between segments",
    "scratch": "scratch, within a segment",
    "batch": "batch",
}
_MAX_REPLICATED = 6


def show(plan: StepPlan, seconds: Seconds | None, memory: float | None) -> None:
    """Print the plan."""
    console = output.console()
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.axes.items())
    console.print(f"mesh {mesh}, {plan.devices:,} devices; on each of them, per step:", soft_wrap=True)
    for table in (_memory(plan, memory), _communication(plan), _parts(plan), _replicated(plan)):
        if table is not None:
            console.print(table)
    if memory is not None:
        left = memory - plan.peak_bytes
        verdict = "fits" if left >= 0 else "does NOT fit"
        words = f"{output.size(left)} left" if left >= 0 else f"{output.size(-left)} too much"
        console.print(f"it {verdict} in {output.size(memory)}: {words}", soft_wrap=True)
    products = _amount(plan.matmul_flops)
    console.print(f"{_amount(plan.flops)}FLOP, of which {products}FLOP in matrix products", soft_wrap=True)
    if seconds is not None:
        links = ", ".join(f"{took(s)} along {axes}" for axes, s in seconds.links.items()) or "nothing sent"
        computing = sum(part.turns * busy for part, busy in zip(plan.parts, seconds.computing, strict=True))
        in_memory = ""
        if seconds.memory:
            size = output.size(plan.memory_bytes)
            in_memory = (
                f" ({took(seconds.compute)} for operations, {took(seconds.memory)} for {size} of memory traffic)"
            )
        console.print(
            f"at least {took(seconds.overlapped)} per step if communication overlaps with computation, "
            f"{took(seconds.apart)} if not: {took(computing)} of computation{in_memory}, {links}",
            soft_wrap=True,
        )


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for n, column in enumerate(columns):
        table.add_column(column, justify="left" if n == 0 else "right", overflow="fold")
    return table


def _memory(plan: StepPlan, memory: float | None) -> Table:
    table = _table("peak memory", "bytes", "")
    for role, name in MEMORY.items():
        table.add_row(name, f"{plan.peak[role]:,}", output.size(plan.peak[role]))
    table.add_section()
    table.add_row(f"in {plan.parts[plan.peak_part].name}", f"{plan.peak_bytes:,}", output.size(plan.peak_bytes))
    table.add_row("(all gradients, if they were held at once)", f"{plan.gradients:,}", output.size(plan.gradients))
    return table


def _communication(plan: StepPlan) -> Table | None:
    rows = plan.collectives()
    if not rows:
        return None
    table = _table("communication per step", "along", "operations", "array bytes", "each device sends")
    for row in rows:
        table.add_row(
            row["kind"],
            " and ".join(row["axes"]),
            f"{row['count']:,}",
            output.size(row["bytes"]),
            output.size(row["sent"]),
        )
    return table


def _parts(plan: StepPlan) -> Table:
    table = _table("segment", "runs", "layers", "FLOP a layer", "gathered", "reduced", "other")
    for part in plan.parts:
        table.add_row(
            label(part),
            str(part.turns),
            str(part.layers),
            _amount(part.work.flops / part.layers),
            *(output.size(part_sent(plan, part, kinds) / part.layers) for kinds in (_GATHERS, _REDUCTIONS, _OTHERS)),
        )
    table.caption = "gathered, reduced, other: bytes that each device sends for one layer"
    return table


_GATHERS = ("all-gather",)
_REDUCTIONS = ("reduce-scatter", "all-reduce")
_OTHERS = ("all-to-all", "collective-permute")


def part_sent(plan: StepPlan, part: PlannedPart, kinds: tuple[str, ...]) -> float:
    """The bytes that each device sends when the part runs once."""
    return sum(row["sent"] for row in plan.collectives(part) if row["kind"] in kinds)


def label(part: PlannedPart) -> str:
    """A part's name and the pass that it belongs to."""
    return f"{part.name} ({'backward, update' if part.updates else 'forward'})"


def _replicated(plan: StepPlan) -> Table | None:
    groups: dict[tuple[Any, ...], list[Any]] = {}
    for array in plan.replicated():
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", array.name), array.why
        groups.setdefault(key, []).append(array)
    if not groups:
        return None
    order = sorted(groups.items(), key=lambda item: -sum(array.bytes for array in item[1]))
    table = _table("replicated", "arrays", "bytes on each", "along", "why")
    table.columns[-1].justify = "left"
    for (name, why), members in order[:_MAX_REPLICATED]:
        table.add_row(name, str(len(members)), f"{sum(m.bytes for m in members):,}", ", ".join(members[0].whole), why)
    rest = [array for _, members in order[_MAX_REPLICATED:] for array in members]
    if rest:
        table.add_row("others (--json has all)", str(len(rest)), f"{sum(array.bytes for array in rest):,}", "", "")
    return table


def _amount(count: float) -> str:
    """Format a number of operations: `1.2 P`."""
    for unit in ("", "k", "M", "G", "T", "P"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} E"


def took(seconds: float) -> str:
    """Format a duration."""
    if not math.isfinite(seconds):
        return "?"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
