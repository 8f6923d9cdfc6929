"""The rules against PyTorch's own samples, and their coverage of Core ATen.

`make test` takes a few samples of the operations of Core ATen, `make sweep` all samples of all operations.
"""

import pytest
import torch

from .coverage_page import ELSEWHERE
from .harness import RULES
from .promised_operations import CORE, CORE_NAMES, aten_names
from .sweep import DTYPES, op_db, sweep_op


def test_core_aten_is_covered():
    missing = {str(overload) for overload in CORE - set(RULES)}
    assert missing == set(ELSEWHERE)
    assert len(CORE) == 193
    print(f"{len(CORE & set(RULES))} of {len(CORE)} Core ATen overloads have a rule; {len(RULES)} rules in all")


CHOSEN = [op for op in op_db if aten_names(op) & CORE_NAMES]

# Problems that begin like this are not the rule's: there can be no rule, or eager does not run the sample.
NOT_THE_RULES = ("random", "not strided", "eager:", "sample:")
BY_DESIGN = (
    "depends on values",
    "reads a value into Python",
    "no counterpart in XLA",
    "as long as its largest value",
    "required keyword-only argument: 'output_size'",  # without it, the size depends on values
)
KNOWN = {
    "nn.functional.grid_sample bfloat16": "eager rounds coordinates to bfloat16",
    "grid_sampler_2d bfloat16": "eager rounds coordinates to bfloat16",
    "grid_sampler_3d bfloat16": "eager rounds coordinates to bfloat16",
    "nn.functional.ctc_loss float32": "the result that only the backward pass reads has no counterpart",
    "nn.functional.nll_loss bfloat16": "eager sums in bfloat16",
    "histc bfloat16": "eager finds bins in bfloat16",
    "matrix_exp bfloat16": "eager overflows",
    "pinverse complex64": "recording a lazily conjugated matrix loses the conjugation",
}


def is_rules_fault(problem: str | None) -> bool:
    return (
        problem is not None and not problem.startswith(NOT_THE_RULES) and not any(text in problem for text in BY_DESIGN)
    )


def name_of(op) -> str:
    return f"{op.name}{'.' * bool(op.variant_test_name)}{op.variant_test_name}"


def assert_samples(op, limits: dict[torch.dtype, int], ignored: str | tuple[str, ...] = ()) -> None:
    for dtype, problems in sweep_op(op, limits).items():
        label = f"{op.name} {str(dtype).removeprefix('torch.')}"
        if label not in KNOWN:
            assert not [p for p in problems if is_rules_fault(p) and not p.startswith(ignored)], label


@pytest.mark.parametrize("op", CHOSEN, ids=name_of)
def test_samples_match_eager(op):
    # Every operation in float32; the other dtypes alternate.
    turn = DTYPES[1 + op_db.index(op) % (len(DTYPES) - 1)]
    assert_samples(op, {torch.float32: 2, turn: 1})


@pytest.mark.sweep
@pytest.mark.parametrize("op", op_db, ids=name_of)
def test_all_samples_match_eager(op):
    # docs/operations.md lists the operations without a rule.
    assert_samples(op, dict.fromkeys(DTYPES, 200), ignored="no rule")
