"""docs/operations.md lists all operations, and a sample of them still have the listed outcome."""

import re
from pathlib import Path

import pytest
import torch

from . import outcomes, samples
from .coverage_page import write_page
from .promised_operations import CORE
from .samples import DYNAMIC, GOOD, LEFT_OUT
from .verdicts import examine

pytestmark = pytest.mark.optimized

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def rows_of(section: str) -> set[str]:
    section_text = PAGE.partition(f"## {section}")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([\w.-]+)(?: †)? \|", section_text, re.MULTILINE)) - {"operation", "overload", "---"}


of_this_torch = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="docs/operations.md is made with torch 2.13, of its operations"
)


@of_this_torch
def test_the_page_lists_every_operation():
    assert rows_of("Operations") == {op.full_name for op in samples.tested()}


def test_the_page_lists_every_core_overload():
    assert rows_of(f"The {len(CORE)} overloads of Core ATen") == {str(overload) for overload in CORE}


def test_a_sweep_changes_only_its_own_row(tmp_path, monkeypatch):
    monkeypatch.setattr(outcomes, "OUTCOMES", tmp_path / "operations.jsonl")
    for name in ("b", "a"):
        outcomes.keep_outcome({"op": name, "limit": 20})
    before = outcomes.OUTCOMES.read_text().splitlines()
    outcomes.keep_outcome({"op": "b", "limit": 250})
    after = outcomes.OUTCOMES.read_text().splitlines()
    assert after[0] == before[0] and after[1] != before[1] and len(after) == 2
    assert outcomes.read_outcomes()["b"]["limit"] == 250


@of_this_torch
def test_the_page_is_up_to_date(tmp_path):
    write_page(outcomes.read_outcomes(), tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == PAGE


# One operation of each family, and what it exercises besides values: in-place and out variants, views, draws,
# gradients.
CHOSEN = {
    "add": torch.int64,  # promotion, in place, out
    "nn.functional.batch_norm": torch.float32,  # also evaluation, which saves empty statistics
    "unsafe_split": torch.float32,  # results that are views for their kernel
    "squeeze": torch.complex64,
    "addmm": torch.float32,  # empty operands
    "arange": torch.int64,  # a factory with out
    "nn.functional.dropout": torch.float32,
    "quantile": torch.float32,
    "topk": torch.float32,
    "masked_fill": torch.bool,
    "nn.functional.scaled_dot_product_attention": torch.float32,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_samples_have_their_outcomes(name):
    op = next(op for op in samples.tested() if op.full_name == name)
    examined = [s for s in examine(op, CHOSEN[name], 4) if s.verdict != LEFT_OUT]
    assert examined
    # before PyTorch 2.12 quantile reads its `q`, so a step cannot have it as an argument
    fine = (*GOOD, DYNAMIC) if name == "quantile" and torch.__version__ < "2.12" else GOOD
    assert not [(s.verdict, s.why) for s in examined if s.verdict not in fine]


# Operations that an earlier sweep found wrong or refused, with the dtype and the special case.
MENDED = {
    ("nonzero_static", torch.int64): "empty tensors: all places are the fill value",
    ("native_dropout_backward", torch.bool): "the scale is not a bool",
    ("renorm", torch.complex64): "a gradient that is NaN in eager, by 0 * inf",
    ("erfinv", torch.float32): "its gradient grows with exp(y^2)",
    ("ldexp", torch.bfloat16): "a product with a rounded power",
    ("linalg.matrix_rank", torch.float32): "out",
    ("special.zeta", torch.float32): "numbers for either operand",
    ("special.ndtr", torch.float32): "out",
    ("nn.functional.gaussian_nll_loss", torch.float32): "a branch that validates",
    ("tensor_split", torch.float32): "places that a constant tensor names",
    ("prod", torch.bool): "the dtype bool",
    ("matmul", torch.int64): "out of three dimensions",
    ("geqrf", torch.float32): "out",
    ("linalg.eigvals", torch.float32): "out",
    ("normal.number_mean", torch.float32): "out",
    ("resize_as_", torch.float32): "",
}


@pytest.mark.parametrize(("name", "dtype"), MENDED)
def test_samples_that_once_failed_pass(name, dtype):
    op = next(op for op in samples.tested() if op.full_name == name)
    examined = [s for s in examine(op, dtype, 30, quickly=True) if s.verdict != LEFT_OUT]
    assert examined
    # locations from an argument of the step are not constants, and are refused with our own message
    fine = (*GOOD, DYNAMIC) if name == "tensor_split" else GOOD
    assert not [(s.verdict, s.why) for s in examined if s.verdict not in fine]
