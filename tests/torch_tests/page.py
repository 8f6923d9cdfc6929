"""The outcomes of PyTorch's own tests: one row per test in docs/torch-tests.jsonl, and the page generated from them."""

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
# The files, and the modes in which their tests run.
FILES = {
    "nn/test_module_hooks.py": ("eager", "backend", "whole"),
    "nn/test_parametrization.py": ("eager", "backend", "steps", "whole"),
    "test_optim.py": ("eager", "backend", "steps"),
}
BAD = ("failed", "differs", "late", "ended")

Row = dict[str, Any]

HEAD = """# PyTorch's own tests

<!-- Written by `python -m tests.torch_tests`. -->

Tests from PyTorch's repository, run unmodified on the backend. What a user would write for the backend is patched into
PyTorch's classes for the duration of each test:

- **eager**: unchanged. Tests that do not pass here are not run any further (the tests of a release assume that release
  of PyTorch, or a GPU).
- **on the backend**: under `with backend.device`, with `lazy_initialization = False`, so that weights are on the
  backend from construction on. A model that the test calls is compiled with `fl.compile`, and so is one that holds the
  tensors passed to an optimizer. Hooks, `state_dict`, copies, pickling, backward passes, optimizer steps,
  parametrizations: the test does all of this to weights on the backend, as between two steps.
- **steps traced**: in addition, each `optimizer.step()` is a step under `@fl.trace`. `optimizer.step(closure)` becomes
  what [the table](traced-steps.md#what-to-write-instead) recommends: a step that calls the closure, and then
  `optimizer.step()`.
- **traced whole**: the whole test is one step under `@fl.trace`, and is called twice (once, if eager PyTorch does not
  pass it twice). Hooks are registered, called and removed during the trace. Tensors are compared in an
  `fl.step_closure`, after the step has run.

In addition to the test's assertions, all outputs of its models and the weights after each `optimizer.step()` are
compared with eager PyTorch. Differences beyond rounding are listed as *differs*. (Traced steps round in float32, in
which step counts are kept: [schedules](optimizers.md#rounding).) Differences that rounding errors of a few units in the
last place also cause in eager PyTorch (as in front of a batch norm, where gradients are zero up to rounding) are not.

- **refused**: one of Firstloss's errors, at the test's line, that says what to write instead.
- **failed**: a failed assertion of the test, or another error. **Late**: not finished within the time limit.
"""


def read_rows() -> dict[tuple[str, str], Row]:
    """Rows by file and test."""
    rows = map(json.loads, ROWS.read_text().splitlines()) if ROWS.exists() else ()
    return {(row["file"], row["test"]): row for row in rows}


def keep(file: str, way: str, outcomes: dict[str, dict[str, Any]], of: str) -> None:
    """Replace the stored outcomes."""
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
    """The outcome of a test in this mode; empty if it was not run."""
    outcome = row.get(way, "")
    return outcome if isinstance(outcome, str) else outcome["verdict"]


def write_page() -> None:
    rows = list(read_rows().values())
    lines = [HEAD]
    files = [file for file in FILES if any(row["file"] == file for row in rows)]
    lines += [
        "| file | PyTorch | mode | tests | pass | refused | failed | differ | late | not run |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for file in files:
        of_file = [row for row in rows if row["file"] == file]
        for way in FILES[file]:
            tally = collections.Counter(
                verdict(row, way) for row in of_file if verdict(row, way) not in ("", "skipped")
            )
            counts = [tally["passed"], tally["refused"], tally["failed"] + tally["ended"]]
            counts += [tally["differs"], tally["late"]]
            counts += [sum(verdict(row, "eager") == "passed" and not verdict(row, way) for row in of_file)]
            of = of_file[0]["of"] if way == "eager" else ""
            name = f"`{file}`" if way == "eager" else ""
            lines.append(f"| {name} | {of} | {NAMES[way]} | {sum(tally.values())} | {' | '.join(map(str, counts))} |")
    lines += ["", *REMARK.splitlines()]
    versions = sorted({f"torch {row['torch']}, jax {row['jax']}" for row in rows})
    dates = sorted({row["run"] for row in rows})
    lines += ["", f"Run with {'; '.join(versions)}, {dates[0]}{'' if len(dates) == 1 else f' to {dates[-1]}'}.", ""]
    for file in files:
        of_file = [row for row in rows if row["file"] == file]
        lines += [f"## {file}", ""]
        for way in FILES[file]:
            lines += _reasons(of_file, way)
    lines += [TAIL]
    PAGE.write_text("\n".join(lines))


REMARK = """\
Each file is from the release in its row, and was run on the PyTorch version below: tests of what has changed in
between, or came later (Muon), do not pass in eager mode. *Not run* are tests that were skipped to save time: with
steps traced, tests that differ only in `is_named`, `contiguous` or `lrsched`, those of schedulers and of averaged
models, and some more.
"""
_THROUGH = (
    "`differentiable=True`: the test computes gradients through the step, and results of a traced step have no graph"
)
KNOWN = {
    ("test_wrapper_subclass_parametrization", "failed"): (
        "it asserts `type(weight) is nn.Parameter`; on the backend a weight's class is Firstloss's own, and "
        "`isinstance(weight, nn.Parameter)` holds"
    ),
    ("test_hook_inplace", "failed"): "it expects an error of PyTorch's whose message has changed",
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
PYTHONPATH=src python -m tests.torch_tests pytorch            # print the outcome of each test
PYTHONPATH=src python -m tests.torch_tests pytorch --write    # also write docs/torch-tests.jsonl and this page
FIRSTLOSS_TORCH_TESTS=pytorch python -m pytest tests/torch_tests
```

PyTorch is not built, and none of its files is part of this repository. The tests of any release can be used; those
that assume another version than the installed one do not pass in eager mode.
"""


def _reasons(rows: list[Row], way: str) -> list[str]:
    """Why tests do not pass: each reason with its tests."""
    reasons: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for row in rows:
        if verdict(row, way) in ("refused", *BAD):
            why = KNOWN.get((_method(row["test"]), verdict(row, way))) or reason(row[way]["why"])
            reasons[verdict(row, way), why].append(row["test"])
    if not reasons:
        return []
    lines = [f"{NAMES[way].capitalize()}:", "", "| outcome | reason | tests |", "| --- | --- | --- |"]
    for (kind, why), tests in sorted(reasons.items(), key=lambda item: (item[0][0], -len(item[1]))):
        names = sorted({_method(test) for test in tests})
        examples = ", ".join(f"`{name}`" for name in names[:6]) + (
            f" and {len(names) - 6} more" if len(names) > 6 else ""
        )
        lines.append(f"| {kind} | {why} | {len(tests)}: {examples} |")
    return [*lines, ""]


def reason(why: str) -> str:
    """An error's message without what is specific to a test, so that all tests with this error share a row."""
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
