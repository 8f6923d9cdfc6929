"""docs/operations.md lists the operations that there are, and a few of them still come out as it says."""

import re
from pathlib import Path

import pytest
import torch

from . import samples
from .listed import CORE
from .samples import GOOD, LEFT_OUT
from .verdicts import examine

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def rows_of(section: str) -> set[str]:
    found = PAGE.partition(f"## {section}")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| ([\w.-]+) \|", found, re.MULTILINE)) - {"operation", "overload", "---"}


def test_the_page_lists_every_operation():
    assert rows_of("Operations") == {op.full_name for op in samples.tested()}


def test_the_page_lists_every_core_overload():
    assert rows_of(f"The {len(CORE)} overloads of Core ATen") == {str(overload) for overload in CORE}


# One operation of each family, what it exercises beside its values: in-place and out variants, views, draws, gradients.
CHOSEN = {
    "add": torch.int64,  # promotion, in place, out
    "nn.functional.batch_norm": torch.float32,  # evaluation too, whose saved statistics are empty
    "unsafe_split": torch.float32,  # results that are views to their kernel
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
def test_samples(name):
    op = next(op for op in samples.tested() if op.full_name == name)
    found = [s for s in examine(op, CHOSEN[name], 4) if s.verdict != LEFT_OUT]
    assert found
    assert not [(s.verdict, s.why) for s in found if s.verdict not in GOOD]
