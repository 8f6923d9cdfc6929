"""A plan drawn as a picture: a device's memory and time."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..files import atomic_write
from .output import size
from .plan_table import MEMORY, label, part_sent, took

if TYPE_CHECKING:
    from ..runtime.step.plan import Seconds, StepPlan

# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), which is safe for colour-blind readers.
_COLOURS = {
    "weights": "#0072B2",
    "state": "#56B4E9",
    "gradients": "#009E73",
    "activations": "#E69F00",
    "scratch": "#D55E00",
    "batch": "#999999",
}
_COMPUTE, _SENDING, _INK = "#0072B2", "#D55E00", "#222222"
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")


def draw(
    path: str | os.PathLike[str], plan: StepPlan, seconds: Seconds | None, memory: float | None, title: str
) -> None:
    """Write the picture as SVG, without changing matplotlib's global state.

    Args:
        seconds: estimated times of the step; without them, bytes and operations are drawn.
        memory: a device's memory, drawn as a line.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    rows = len(plan.parts)
    figure = Figure(figsize=(11, 3.2 + 0.42 * rows), layout="constrained")
    canvas = FigureCanvasSVG(figure)
    top, below = figure.subplots(2, 1, height_ratios=[1.4, 0.6 + 0.42 * rows])
    _draw_memory(top, plan, memory)
    _draw_work(below, plan, seconds)
    mesh = " x ".join(f"{axis}={count}" for axis, count in plan.axes.items())
    figure.suptitle(f"{title}, each of {plan.devices:,} devices ({mesh})", fontsize=13, fontweight="bold", color=_INK)
    # Keep text as text: the file is a tenth of the size, and searchable.
    with rc_context({"svg.fonttype": "none"}), atomic_write(path) as file:
        canvas.figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})


def _draw_memory(axis, plan: StepPlan, memory: float | None) -> None:
    left, gib = 0.0, float(1 << 30)
    for role, name in MEMORY.items():
        width = plan.peak[role] / gib
        axis.barh(0, width, left=left, height=0.6, color=_COLOURS[role], edgecolor="white", linewidth=0.5,
                  label=f"{name} {size(plan.peak[role])}")  # fmt: skip
        left += width
    axis.set_title(f"peak memory: {size(plan.peak_bytes)}", loc="left", fontsize=11, fontweight="bold")
    if memory is not None:
        axis.axvline(memory / gib, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.text(memory / gib, 0.45, f" {size(memory)}", ha="left", va="center", fontsize=9, color=_INK)
    axis.set_xlim(0, max(left, (memory or 0) / gib) * 1.12)
    axis.set_ylim(-0.5, 0.6)
    axis.set_yticks([])
    axis.set_xlabel("GiB", color=_INK)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.42), ncols=3, fontsize=9, frameon=False)
    _plain(axis)


def _draw_work(axis, plan: StepPlan, seconds: Seconds | None) -> None:
    rates = seconds is not None and plan.flops > 0
    compute = [part.turns * part.work.flops for part in plan.parts]
    sending = [part.turns * part_sent(plan, part, _KINDS) for part in plan.parts]
    if rates:
        assert seconds is not None
        compute = [part.turns * took for part, took in zip(plan.parts, seconds.computing, strict=True)]
        sending = [part.turns * took for part, took in zip(plan.parts, seconds.sending, strict=True)]
    for i in range(len(plan.parts)):
        for values, shift, colour, kind in (
            (compute, 0.19, _COMPUTE, "computation"),
            (sending, -0.19, _SENDING, "communication"),
        ):
            scale = 1.0 if rates else max(max(values), 1e-30)
            y = len(plan.parts) - 1 - i + shift
            axis.barh(y, values[i] / scale, height=0.36, color=colour, label=kind if i == 0 else None)
            text = took(values[i]) if rates else f"{values[i]:.2g} FLOP" if kind == "computation" else size(values[i])
            axis.text(values[i] / scale, y, f" {text}", va="center", ha="left", fontsize=8.5, color=_INK)
    names = [f"{label(part)} x{part.turns}" for part in reversed(plan.parts)]
    axis.set_yticks(range(len(plan.parts)), names, fontsize=9)
    axis.set_xlabel("seconds per step" if rates else "share of the largest", color=_INK)
    axis.margins(x=0.14)
    if rates:
        assert seconds is not None
        axis.set_title(
            f"at least {took(seconds.overlapped)} per step if communication overlaps, {took(seconds.apart)} if not",
            loc="left", fontsize=11, fontweight="bold",
        )  # fmt: skip
    axis.legend(loc="lower right", fontsize=9, frameon=False)
    _plain(axis)


def _plain(axis) -> None:
    axis.grid(axis="x", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", length=0, colors=_INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
