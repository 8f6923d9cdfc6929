"""docs/operations.md: the results of the `coverage` sweep, as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstloss.lower.rules import RULES

from .core_samples import DIRECT
from .promised_operations import CORE, is_listed
from .samples import ABSENT, AS_EXACT, DIFFERS, DRAWN, DTYPES, DYNAMIC, FAILS, GOOD, LEFT_OUT, PASSES, REFUSED, tested

# Core overloads that need no lowering, and why.
ELSEWHERE = {
    "aten.atan2.out": "functional graphs have no out; lowered as `aten.atan2`",
    "aten.resize_.default": "capture gives the tensor another geometry; functional graphs have aten.resize",
    "aten.sym_stride.int": "strides are known at capture",
    "aten.sym_storage_offset.default": "known at capture",
    "aten.sym_is_contiguous.default": "known at capture",
}

HEAD = """# Operations

<!-- Written by `python -m tests.lower.coverage`. -->

Every operation in PyTorch's own operator tests (`op_db`), with PyTorch's samples: each is captured like a step,
lowered, compiled and run, and its outputs and gradients are compared with eager PyTorch's in value, shape and dtype.
The samples include in-place and out variants for float32 and int64, six of each.

- **passes**: within the tolerance of PyTorch's own tests for the operation. In parentheses, how many of these are only
  *as exact*: outside that tolerance elementwise, but within it of the float64 result relative to the largest element,
  or at most four times as far from it as eager PyTorch. Both are sums of the same terms in another order. Gradients of
  matrix decompositions, which divide by differences of eigenvalues, may be off by 1e-5 of the largest element.
- **drawn**: random; shape and dtype are compared. `tests/lower/test_random.py` tests the distributions.
- **dynamic**: the shape of the result, or whether there is an error, depends on values: an error at the user's line
  that says what to write instead.
- **refused**: an error that names the operation and the reason.
- **absent**: no lowering and no decomposition: an error that names the operation and the user's line.
- **fails**: an error that is not one of Firstloss's.
- **differs**: a value different from eager's, with the reason.

The sweep compiles many samples as one program, without XLA's optimizations, which takes a tenth of the time. One
sample of each operation in float32 and bfloat16, and every sample that does not pass, is compiled as for users.
"""


def write_page(outcomes: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the page to `path`."""
    ops = {op.full_name: op for op in (*DIRECT, *tested())}
    outcomes = {name: outcome for name, outcome in outcomes.items() if name in ops}
    lines = [HEAD, *_limits(outcomes), *_totals(outcomes, ops), *_core(outcomes), *_operations(outcomes)]
    path.write_text("\n".join(lines) + "\n")


def _total(outcome: dict[str, Any], *verdicts: str) -> int:
    return sum(counts.get(v, 0) for counts in outcome["dtypes"].values() for v in verdicts)


def _limits(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    """Versions, omissions, and what is from an earlier sweep."""
    versions = sorted({f"torch {outcome['torch']} and jax {outcome['jax']}" for outcome in outcomes.values()})
    lines = [f"Swept with {', '.join(versions)}.", ""]
    cut = [(outcome["limit"], n) for outcome in outcomes.values() for n in outcome["cut"].values()]
    if cut:
        least, every = min(limit for limit, _ in cut), sum(n for _, n in cut)
        lines += [
            f"If an operation has more than {least} samples in a dtype, at least {least} of them were taken, spread "
            f"evenly: in {len(cut)} cases, {sum(limit for limit, _ in cut):,} of {every:,}.",
            "",
        ]
    earlier = len([outcome for outcome in outcomes.values() if not outcome["limit"]])
    if earlier:
        lines += [
            f"{earlier} operations, marked †, are from an earlier sweep, with at least 20 samples per dtype where "
            "there are as many.",
            "",
        ]
    missing = len([op for op in tested() if op.full_name not in outcomes])
    return [*lines, f"{missing} operations are not swept yet.", ""] if missing else lines


def _totals(outcomes: dict[str, dict[str, Any]], ops: dict[str, Any]) -> list[str]:
    listed = [outcome for name, outcome in outcomes.items() if is_listed(ops[name])]
    columns = [outcomes.values(), listed]
    verdicts = (*GOOD, DYNAMIC, REFUSED, ABSENT, FAILS, DIFFERS)
    every = [sum(_total(o, *verdicts) for o in column) for column in columns]
    lines = [
        f"{every[0]:,} samples of {len(outcomes)} operations; {every[1]:,} of them belong to the {len(listed)} that "
        "are in Core ATen or in the operator families that models use (`tests/lower/promised_operations.py`):",
        "",
        "| outcome | all | | Core and listed | |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for verdict in verdicts:
        counts = [sum(_total(o, verdict) for o in column) for column in columns]
        cells = (f"{count:,} | {count / max(of, 1):.2%}" for count, of in zip(counts, every, strict=True))
        lines.append(f"| {verdict} | {' | '.join(cells)} |")
    return [*lines, ""]


def _core(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    used: dict[str, list[int]] = {}
    for outcome in outcomes.values():
        for overload, (good, every) in outcome["overloads"].items():
            counts = used.setdefault(overload, [0, 0])
            counts[0] += good
            counts[1] += every
    lines = [
        f"## The {len(CORE)} overloads of Core ATen",
        "",
        "Samples: those during whose capture PyTorch's dispatcher called the overload, good ones of all, including our "
        "own samples, which call it by name (`tests/lower/core_samples.py`). Operations marked † are not counted.",
        "",
        "| overload | lowering | samples |",
        "| --- | --- | ---: |",
    ]
    for overload in sorted(CORE, key=str):
        name = str(overload)
        where = (
            f"`{RULES[overload].__module__.rpartition('.')[2]}.py`"
            if overload in RULES
            else ELSEWHERE.get(name, "absent")
        )
        good, every = used.get(name, (0, 0))
        lines.append(f"| {name} | {where} | {f'{good} of {every}' if every else ''} |")
    return [*lines, ""]


def _cell(counts: dict[str, int] | None) -> str:
    if counts is None:
        return ""
    good, every = sum(counts.get(v, 0) for v in GOOD), sum(n for v, n in counts.items() if v != LEFT_OUT)
    exact = f" ({counts[AS_EXACT]})" if counts.get(AS_EXACT) else ""
    if counts.get(DRAWN) and not counts.get(PASSES):
        return f"{good} drawn" if good == every else f"{good} of {every} drawn"
    return f"{good}{exact}" if good == every else f"**{good}**{exact} of {every}"


def _operations(outcomes: dict[str, dict[str, Any]]) -> list[str]:
    names = [str(d).removeprefix("torch.") for d in DTYPES]
    lines = [
        "## Operations",
        "",
        "Samples that pass, by dtype; a single number if all do.",
        "",
        f"| operation | {' | '.join(names)} | otherwise |",
        f"| --- |{' ---: |' * len(names)} --- |",
    ]
    for name in sorted(op.full_name for op in tested()):
        outcome = outcomes.get(name)
        if outcome is None:
            lines.append(f"| {name} |{' |' * len(names)} not swept yet |")
            continue
        cells = " | ".join(_cell(outcome["dtypes"].get(dtype)) for dtype in names)
        lines.append(f"| {name}{'' if outcome['limit'] else ' †'} | {cells} | {_remark(outcome)} |")
    return lines


def _remark(outcome: dict[str, Any]) -> str:
    parts = []
    for verdict in (DIFFERS, FAILS, ABSENT, REFUSED, DYNAMIC):
        count = _total(outcome, verdict)
        if count:
            parts.append(f"{count} {verdict}: {outcome['why'][verdict]}".replace("|", "\\|"))
    return "; ".join(parts)
