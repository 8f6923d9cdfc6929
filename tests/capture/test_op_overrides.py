"""The tables that have operations by name."""

import pytest
import torch

from firstloss.capture import shapes
from firstloss.capture.op_overrides import HANDLERS

BY_TORCH_NAME = [*shapes._WRONG_META_KERNELS, *shapes._SHAPES, *shapes._CPU_SHAPES, *shapes._NUMBERS_OF_SHAPES]


@pytest.mark.parametrize("name", HANDLERS)
def test_a_handler_has_an_operation(name):
    packet, _, overload = name.removeprefix("aten::").partition(".")
    assert getattr(getattr(torch.ops.aten, packet), overload or "default").name() == name


@pytest.mark.parametrize("name", sorted(set(BY_TORCH_NAME)))
def test_a_shape_has_an_operation(name):
    _, packet, overload = name.split(".")
    assert str(getattr(getattr(torch.ops.aten, packet), overload)) == name
