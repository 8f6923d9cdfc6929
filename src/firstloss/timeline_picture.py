"""Timelines drawn as bars over time: one group per timeline, one row per phase, on a common axis."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

from .files import atomic_write

# The palette of Okabe and Ito (https://jfly.uni-koeln.de/color/), which is safe for colour-blind readers.
_COLOURS = {
    "import": "#999999",
    "construct": "#E69F00",
    "capture": "#E69F00",
    "trace": "#56B4E9",
    "lower": "#0072B2",
    "compile": "#CC79A7",
    "materialize": "#009E73",
    "move": "#009E73",
    "first step": "#D55E00",
    "rest of the step": "#F0E442",
}
_OTHER = "#F0E442"
_INK = "#222222"


class Phases(Protocol):
    """The part of `firstloss.timeline.Timeline` that is drawn."""

    @property
    def spans(self) -> Sequence[Any]: ...

    @property
    def losses(self) -> Sequence[Any]: ...

    @property
    def first_loss(self) -> float | None: ...

    def table(self) -> Sequence[Any]: ...


def draw(path: str | os.PathLike[str], groups: list[tuple[str, Phases]], title: str | None = None) -> None:
    """Write the picture as PNG, without changing matplotlib's global state or importing pyplot."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [max(1, len(timeline.table())) for _, timeline in groups]
    figure = Figure(figsize=(11, 1.5 + 0.36 * sum(rows) + 0.45 * len(groups)), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=[n + 0.9 for n in rows])[:, 0]
    width = max(_shown(timeline) for _, timeline in groups) * 1.12 or 1.0
    for axis, (name, timeline) in zip(axes, groups, strict=True):
        _draw_group(axis, name, timeline, width)
    axes[-1].set_xlabel("seconds since the process started", color=_INK)
    axes[-1].tick_params(axis="x", bottom=True, labelbottom=True)
    figure.suptitle(title or headline(groups), fontsize=13, fontweight="bold", color=_INK)
    with atomic_write(path) as file:
        canvas.figure.savefig(file, format="png", dpi=150, facecolor="white")


def headline(groups: list[tuple[str, Phases]]) -> str:
    """In one line, when the first and the last loss came, if the timelines have the same losses."""
    names = [mark.name for mark in groups[0][1].losses]
    if not names or any([mark.name for mark in timeline.losses] != names for _, timeline in groups):
        return "Timeline"
    moments = []
    for number in sorted({0, len(names) - 1}):
        times = ", ".join(f"{name} {timeline.losses[number].at:.1f} s" for name, timeline in groups)
        moments.append(f"{names[number]}: {times}")
    line = "; ".join(moments)
    return line[0].upper() + line[1:]


def _shown(timeline: Phases) -> float:
    """The range of a timeline that is shown: up to its last loss, or all of it if there is none."""
    if timeline.losses:
        return timeline.losses[-1].at
    return max((span.end for span in timeline.spans), default=0.0)


def _draw_group(axis, name: str, timeline: Phases, width: float) -> None:
    table = timeline.table()
    height = {row.name: len(table) - 1 - i for i, row in enumerate(table)}
    for row in table:
        colour = _COLOURS.get(row.name, _OTHER)
        spans = [span for span in timeline.spans if span.name == row.name]
        bars = [(span.start, max(span.seconds, width / 600)) for span in spans]  # wide enough to be visible
        axis.broken_barh(bars, (height[row.name] - 0.36, 0.72), facecolor=colour, edgecolor="white", linewidth=0.5)
        end = max(span.end for span in spans)
        inside = end > 0.93 * width  # no room for a label beyond the bar
        at = min(end, width) + (-1 if inside else 1) * width * 0.006
        side = "right" if inside else "left"
        axis.text(at, height[row.name], duration(row.seconds), va="center", ha=side, fontsize=9, color=_INK)
    if timeline.first_loss is not None:
        axis.axvline(timeline.first_loss, color=_INK, linewidth=1.2, linestyle=(0, (4, 2)))
        axis.annotate(
            f"first loss {duration(timeline.first_loss)}",
            (timeline.first_loss, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=10,
            fontweight="bold",
            color=_INK,
        )
    for mark in timeline.losses:
        axis.axvline(mark.at, ymax=0.4 / (len(table) + 0.9), color=_INK, linewidth=1.2)
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axis.set_yticks(list(height.values()), list(height))
    axis.set_ylim(-0.6, max(0, len(table) - 1) + 0.6)
    axis.set_xlim(0, width)
    axis.grid(axis="x", color="#dddddd", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(axis="both", length=0, labelbottom=False, colors=_INK)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def duration(seconds: float) -> str:
    """Format a duration: `12.3 s`, `1.23 s`, `45 ms`."""
    if seconds >= 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.0f} ms"
