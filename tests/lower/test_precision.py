"""float32 products follow PyTorch's settings for a GPU: checked in the lowered module, without a GPU."""

import jax
import pytest
import torch
from torch import nn

from firstloss.lower import precision
from firstloss.lower.program import function_of, template_of
from firstloss.program.graph import Node, Ref, Value
from firstloss.program.source import UNKNOWN

aten = torch.ops.aten


@pytest.fixture
def as_it_was():
    """Restores PyTorch's settings afterwards."""
    products, convolutions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = products
    torch.backends.cudnn.conv.fp32_precision = convolutions


def lowered(op, *shapes, more=()):
    values = [
        Value(shape, nn.Parameter(torch.empty(shape)).stride(), torch.float32, torch.device("cpu")) for shape in shapes
    ]
    node = Node(0, op, (*map(Ref.of, values), *more), {}, (), False, None, UNKNOWN)
    with torch.device("meta"):
        result = op(*(torch.empty(shape) for shape in shapes), *more)
    node.outputs = (Value(tuple(result.shape), result.stride(), torch.float32, torch.device("cpu")),)
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return function_of(template_of(node, []), False, precision.now()).lower(*arrays).as_text()


def products():
    return lowered(aten.mm.default, (3, 4), (4, 5))


def convolutions():
    return lowered(aten.convolution.default, (1, 2, 5), (3, 2, 3), more=(None, [1], [0], [1], False, [0], 1))


def test_float32_products_are_full_precision_by_default(as_it_was, monkeypatch):
    for on_gpu in (False, True):
        monkeypatch.setattr(precision, "is_for_gpus", lambda on_gpu=on_gpu: on_gpu)
        assert "HIGHEST" in products()


def test_products_follow_pytorchs_tf32_setting(as_it_was, monkeypatch):
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert "HIGHEST" in products()  # on a CPU
    monkeypatch.setattr(precision, "is_for_gpus", lambda: True)
    assert "HIGHEST" not in products()
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert "HIGHEST" in products()


def test_convolutions_follow_pytorchs_tf32_setting(as_it_was, monkeypatch):
    assert "HIGHEST" in convolutions()
    monkeypatch.setattr(precision, "is_for_gpus", lambda: True)
    assert "HIGHEST" not in convolutions()
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert "HIGHEST" in convolutions()
