"""Every public name of `cerebras.pytorch` 2.10 and of Model Zoo's `trainer`, and what it is here.

`names.jsonl` is the data, a line a name: names and signatures as they were read from the packages, and for each whether
it is the same here, differs (how), or is not here (why). This compares it with what there is, and makes the page
docs/cstorch-names.md of it: `python -m tests.cstorch.names` writes it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("names.jsonl")
PAGE = ROOT / "docs" / "cstorch-names.md"
STATUSES = ("same", "differs", "not here")
PACKAGES = {
    "cerebras.pytorch": "`cerebras.pytorch` 2.10",
    "cerebras.modelzoo.trainer": "`cerebras.modelzoo.trainer` 2.10",
}

SURFACE = "2d5141dee1f89d32"  # of what was read; a name more or less, and this is another


def digest():
    """Of the names and signatures, whatever is said of them."""
    keys = sorted((row["package"], row["module"], row["name"], row["signature"]) for row in rows())
    return hashlib.sha256(json.dumps(keys).encode()).hexdigest()[:16]


def rows():
    return [json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines()]


def found(path):
    """The object under a path such as firstloss.cstorch.optim.AdamW.step; None if there is none."""
    parts = path.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            here = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            if not hasattr(here, part) and not (inspect.isclass(here) and part in getattr(here, "__annotations__", {})):
                return None
            here = getattr(here, part, here)
        return here
    return None


def parameters(signature):
    """[(name, default as it is written or None, kind)] of "(a, b=1, *, c=2, **d)"."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [ast.unparse(d) for d in arguments.defaults]
    made = [(a.arg, d, "positional") for a, d in zip(positional, defaults, strict=True)]
    made += [(arguments.vararg.arg, None, "*")] if arguments.vararg else []
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        made.append((argument.arg, None if default is None else ast.unparse(default), "by name"))
    return [*made, (arguments.kwarg.arg, None, "**")] if arguments.kwarg else made


def why_not_same(row):
    """In words, why a name that is said to be the same is not; empty if it is."""
    ours = found(row["ours"])
    if ours is None:
        return f"{row['ours']} is not there"
    if not row["signature"].startswith("("):
        return ""
    try:
        signature = inspect.signature(ours)
    except (TypeError, ValueError):
        return "it has no signature"
    have = {p.name: p for p in signature.parameters.values() if p.name not in ("self", "cls")}
    places = list(have)
    kinds = {p.kind for p in have.values()}
    for place, (name, default, kind) in enumerate(parameters(row["signature"])):
        if kind in ("*", "**"):
            if kind == "**" and inspect.Parameter.VAR_KEYWORD not in kinds:
                return f"it does not take **{name}"
            continue
        if name not in have:
            return f"it has no argument {name}"
        ours_default = have[name].default
        if kind == "positional" and (have[name].kind is inspect.Parameter.KEYWORD_ONLY or places.index(name) != place):
            return f"its argument {name} is at another place"
        if (default is None) != (ours_default is inspect.Parameter.empty):
            return f"its argument {name} has the default {ours_default!r}"
        if default is not None and not alike(default, ours_default):
            return f"its argument {name} has the default {ours_default!r}, not {default}"
    return ""


def alike(written, value):
    if repr(value) == written or (written == "..." and value is ...):
        return True
    try:
        return ast.literal_eval(written) == value
    except ValueError:
        return False


def page():
    all_rows = rows()
    counts = {s: sum(row["status"] == s for row in all_rows) for s in STATUSES}
    lines = [
        "# Cerebras' names, one by one",
        "",
        "Made by `python -m tests.cstorch.names` of `tests/cstorch/names.jsonl`; a test holds both against the code.",
        "",
        f"{len(all_rows)} public names: {counts['same']} the same, {counts['differs']} that differ, "
        f"{counts['not here']} that are not here. What is said to be the same takes the arguments that are shown, at "
        "the same places and with the same defaults; it may take more. Which package to import, "
        "[firstloss or firstloss.cstorch](cstorch.md) says.",
    ]
    for package, title in PACKAGES.items():
        lines += ["", f"## {title}"]
        module = None
        for row in (row for row in all_rows if row["package"] == package):
            if row["module"] != module:
                module = row["module"]
                full = f"{package}.{module}" if module else package
                lines += ["", f"### {full}", "", "| name | status | here, or why not |", "| --- | --- | --- |"]
            shown = f"`{row['name']}{row['signature'] if row['signature'].startswith('(') else ''}`".replace("|", "\\|")
            ours = f"`{row['ours']}`" if row["ours"] else ""
            note = row["note"].replace("|", "\\|")
            text = ". ".join(part for part in (ours, note) if part)
            lines.append(f"| {shown} | {row['status']} | {text} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    wrong = [(row["name"], why_not_same(row)) for row in rows() if row["status"] == "same" and why_not_same(row)]
    sys.exit("\n".join(f"{name}: {why}" for name, why in wrong))
