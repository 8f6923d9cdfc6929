"""What became of PyTorch's own tests: a row a test in docs/torch-tests.jsonl, and the page of the rows."""

from __future__ import annotations

import collections
import datetime
import importlib.metadata
import json
import os
import re
from pathlib import Path
from typing import Any

from .ways import WAYS

DOCS = Path(__file__).parents[2] / "docs"
ROWS = DOCS / "torch-tests.jsonl"
PAGE = DOCS / "torch-tests.md"
# The files, and the ways in which their tests are run.
FILES = {
    "nn/test_module_hooks.py": ("eager", "backend", "whole"),
    "nn/test_parametrization.py": ("eager", "backend", "steps", "whole"),
    "test_optim.py": ("eager", "backend", "steps"),
}
BAD = ("failed", "differs", "late", "ended")

Row = dict[str, Any]

HEAD = """# PyTorch's own tests

<!-- Written by `python -m tests.torch_tests`. -->

Tests of PyTorch's repository, as they are, run as clients of the backend. Nothing in a test is edited. What a user
would write for the backend is put into PyTorch's classes from outside, for the time of one test:

- **eager**: as it is. What does not pass so here is not run further (the tests of a release expect things of that
  release's PyTorch, or of a GPU).
- **on the backend**: under `with backend.device`, with `lazy_initialization = False`, so that weights live on the
  backend from their constructor on. A model that the test calls is compiled with `fl.compile`, and so is one that holds
  the tensors that the test gives an optimizer. Hooks, `state_dict`, copies, pickles, backward passes, optimizer steps,
  parametrizations: all that the test does, it does to weights on the backend, as between two steps.
- **steps traced**: so, and each `optimizer.step()` is a step under `@fl.trace`. `optimizer.step(closure)` becomes what
  [the table](how-to/traced-step.md#what-to-write-instead) says to write: a step that calls the closure, and then
  `optimizer.step()`.
- **traced whole**: the test, from its first line to its last, is one step under `@fl.trace`, and is called twice (once,
  where eager PyTorch does not pass it twice). Hooks are registered, fire and are removed while it is traced.
  Comparisons of tensors are made by `fl.step_closure`, when the step has been run.

Beside what a test asserts, all that its models return and what each `optimizer.step()` makes of the weights is compared
with eager PyTorch: what is not the same within rounding (of float32 where steps are traced, for step counts are kept in
it: [schedules](schedules.md)) is listed as *differs*. Where rounding errors of a few units in the last place make a
difference in eager PyTorch as well (a batch norm follows, so that gradients are zero but for rounding), it is not.

- **refused**: an error of Firstloss's own, at the test's line, that says what to write instead.
- **failed**: an assertion of the test, or another error. **Late**: no end within the time for one test.
"""


def read_rows() -> dict[tuple[str, str], Row]:
    """By file and test."""
    rows = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {(row["file"], row["test"]): row for row in rows}


def keep(file: str, way: str, outcomes: dict[str, dict[str, Any]], of: str) -> None:
    """Put outcomes in place of the last ones."""
    rows = read_rows()
    versions = {package: importlib.metadata.version(package) for package in ("torch", "jax")}
    run = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    for test, outcome in outcomes.items():
        row = rows.setdefault((file, test), {"file": file, "test": test})
        row[way] = {"verdict": outcome["verdict"], "why": outcome.get("why", "")}
        if outcome["verdict"] in ("passed", "skipped"):
            row[way] = outcome["verdict"]
        row |= {"of": of, **versions, "run": run}
    scratch = ROWS.with_suffix(".part")
    scratch.write_text("".join(json.dumps(rows[key]) + "\n" for key in sorted(rows)))
    os.replace(scratch, ROWS)


def verdict(row: Row, way: str) -> str:
    """What became of a test in this way; empty if it was not run."""
    found = row.get(way, "")
    return found if isinstance(found, str) else found["verdict"]


def write_page() -> None:
    rows = list(read_rows().values())
    lines = [HEAD]
    files = [file for file in FILES if any(row["file"] == file for row in rows)]
    lines += [
        "| file | of PyTorch | way | tests | pass | refused | failed | differ | late | not run |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file in files:
        ours = [row for row in rows if row["file"] == file]
        for way in FILES[file]:
            found = collections.Counter(verdict(row, way) for row in ours if verdict(row, way) not in ("", "skipped"))
            counts = [found["passed"], found["refused"], found["failed"] + found["ended"]]
            counts += [found["differs"], found["late"]]
            counts += [sum(verdict(row, "eager") == "passed" and not verdict(row, way) for row in ours)]
            of = ours[0]["of"] if way == "eager" else ""
            name = f"`{file}`" if way == "eager" else ""
            lines.append(f"| {name} | {of} | {NAMES[way]} | {sum(found.values())} | {' | '.join(map(str, counts))} |")
    lines += ["", *REMARK.splitlines()]
    versions = sorted({f"torch {row['torch']}, jax {row['jax']}" for row in rows})
    dates = sorted({row["run"] for row in rows})
    lines += ["", f"Run with {'; '.join(versions)}, {dates[0]}{'' if len(dates) == 1 else f' to {dates[-1]}'}.", ""]
    for file in files:
        ours = [row for row in rows if row["file"] == file]
        lines += [f"## {file}", ""]
        for way in FILES[file]:
            lines += _reasons(ours, way)
    lines += [TAIL]
    PAGE.write_text("\n".join(lines))


REMARK = """\
Each file is of the release that its row names, and was run on the PyTorch below: what has changed in between, or came
later (Muon), does not pass eager. *Not run* is what was left out for the time that it takes: with steps traced, tests
that differ in `is_named`, `contiguous` or `lrsched` alone, those of schedulers and of averaged models, and some more.
"""
_THROUGH = (
    "`differentiable=True`: the test asks for gradients through the step, and what a traced step leaves has no graph"
)
KNOWN = {
    ("test_wrapper_subclass_parametrization", "failed"): (
        "it asserts `type(weight) is nn.Parameter`; on the backend a weight's class is Firstloss's own, and "
        "`isinstance(weight, nn.Parameter)` holds"
    ),
    ("test_hook_inplace", "failed"): "it expects an error of PyTorch's that has other words now",
    **{
        (f"test_{name}", outcome): _THROUGH
        for name in "adadelta adagrad adam adamax adamw asgd nadam radam rmsprop rprop sgd".split()
        for outcome in ("refused", "failed")
    },
}
NAMES = dict(zip(WAYS, ("eager", "on the backend", "steps traced", "traced whole"), strict=True))
TAIL = """## To run them

```sh
git clone --depth 1 --branch v2.13.0 https://github.com/pytorch/pytorch
PYTHONPATH=src python -m tests.torch_tests pytorch            # what became of each
PYTHONPATH=src python -m tests.torch_tests pytorch --write    # and keep it in docs/torch-tests.jsonl, and this page
FIRSTLOSS_TORCH_TESTS=pytorch python -m pytest tests/torch_tests
```

Nothing of PyTorch is built, and none of its files is a part of this repository. Any release's tests will do; those that
expect another PyTorch than the installed one do not pass eager.
"""


def _reasons(rows: list[Row], way: str) -> list[str]:
    """Why tests do not pass, each reason with the tests that have it."""
    found: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        if verdict(row, way) in ("refused", *BAD):
            why = KNOWN.get((_method(row["test"]), verdict(row, way))) or reason(row[way]["why"])
            found[verdict(row, way), why].append(row["test"])
    if not found:
        return []
    lines = [f"{NAMES[way].capitalize()}:", "", "| outcome | why | tests |", "| --- | --- | --- |"]
    for (kind, why), tests in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]))):
        names = sorted({_method(test) for test in tests})
        shown = ", ".join(f"`{name}`" for name in names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        lines.append(f"| {kind} | {why} | {len(tests)}: {shown} |")
    return [*lines, ""]


def reason(why: str) -> str:
    """An error's words without what is another test's: one row for all tests that meet it."""
    why = why.partition(" To execute this test")[0]
    for pattern, words in (
        (
            r"asks for a value, while the step is being traced.*",
            "`...` asks for a value, while the step is being traced",
        ),
        (r"(\w+) cannot be traced: it (.*)", r"\1 cannot be traced: it \2"),
        (r"\w+\.__init__\(\) got an unexpected keyword argument 'verbose'", "a scheduler takes no `verbose` any more"),
        (r"(Muon only supports 2D parameters) .*", r"\1, which these tests do not know yet"),
        (r"the size of what .* makes depends on values.*", "the size of a result depends on values"),
    ):
        match = re.search(pattern, why)
        if match is not None:
            kind = why.partition(":")[0]
            text = match.expand(words)
            return f"{kind}: {text}".replace("|", "\\|") if kind.endswith("Error") else text
    return why.replace("|", "\\|").replace("<", "&lt;")[:240]


def _method(test: str) -> str:
    """A test's name without the parameters that PyTorch's generators append."""
    name = test.partition(".")[2]
    return re.sub(r"_(swap|is_named|contiguous|LRClass|named_tuple|impl)_.*$|_[A-Z]\w*_cpu.*$", "", name)
