"""The names of operations that have a rule, without importing the rules, which import JAX.

`rules.txt` lists them; `python -m firstloss.lower.rule_names` rewrites it, and a test compares it with the table.
"""

from __future__ import annotations

import functools
from pathlib import Path

from ..program.program import Program
from .functional_overloads import functional
from .registry import RULES

_LIST = Path(__file__).with_name("rules.txt")


@functools.cache
def listed() -> frozenset[str]:
    """The names of the overloads that have a rule."""
    return frozenset(_LIST.read_text().split())


def all_have_rules(program: Program) -> bool:
    """Whether each operation in `program` has a rule; decompositions do not count."""
    known = listed()
    ops = {node.op for node in program.nodes}
    return all(str(functional(op)) in known or str(op) in known or op in RULES for op in ops)


if __name__ == "__main__":
    from . import rules

    _LIST.write_text("\n".join(sorted(map(str, rules.RULES))) + "\n")
