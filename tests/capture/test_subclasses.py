"""User-defined tensor classes, and tensors without strides."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

import firstloss as fl
from tests.capture.eager_comparison import bytes_of, deferred, eager, materialize


class Tagged(torch.Tensor):
    pass


class Counted(nn.Parameter):
    def __new__(cls, data=None, requires_grad=True, bits=4):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.bits = bits
        return self


class Scaled(torch.Tensor):
    """A wrapper of two tensors, as used for quantized weights."""

    @staticmethod
    def __new__(cls, whole, scale):
        self = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=whole.dtype, device=whole.device)
        self.whole, self.scale = whole, scale
        return self

    def __tensor_flatten__(self):
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(parts, context, size, stride):
        return Scaled(parts["whole"], parts["scale"])

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.mul_.Tensor, torch.ops.aten.alias.default):
            out = Scaled(func(args[0].whole, *args[1:]), args[0].scale)
            return args[0] if func is torch.ops.aten.mul_.Tensor else out
        raise NotImplementedError(func)


def of(call):
    layer = nn.Linear(3, 4)
    layer.weight = call(torch.randn(4, 3))
    layer.more = nn.Linear(2, 2)
    return layer


BUILDERS = {
    "as_subclass": lambda: of(lambda t: nn.Parameter(t.as_subclass(Tagged))),
    "called": lambda: of(lambda t: nn.Parameter(Tagged(t))),
    "called with a real one": lambda: of(lambda t: nn.Parameter(Tagged(torch.from_numpy(t.numpy())))),
    "parameter class": lambda: of(lambda t: Counted(t, bits=8)),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_subclass_is_materialized_at_once(name):
    (expected, state), (actual, actual_state) = eager(BUILDERS[name]), deferred(BUILDERS[name])
    assert state == actual_state
    assert type(actual.weight) is type(expected.weight) and not fl.is_deferred(actual.weight)
    assert fl.is_deferred(actual.more)
    materialize(actual)
    assert getattr(actual.weight, "bits", None) == getattr(expected.weight, "bits", None)
    for a, b in zip(expected.parameters(), actual.parameters(), strict=True):
        assert bytes_of(a) == bytes_of(b)


def test_a_wrapper_subclass_stays_deferred():
    def build():
        layer = of(lambda t: nn.Parameter(Scaled(t, torch.rand(4, 1))))
        with torch.no_grad():
            layer.weight.mul_(2)
        return layer

    (expected, state), (actual, actual_state) = eager(build), deferred(build)
    assert state == actual_state and fl.is_deferred(actual.weight)
    fl.materialize_module(actual)
    assert not fl.is_deferred(actual) and type(actual.weight) is Scaled
    for part in ("whole", "scale"):
        assert type(getattr(actual.weight, part)) is torch.Tensor
        assert bytes_of(getattr(actual.weight, part)) == bytes_of(getattr(expected.weight, part))


def test_tensors_without_strides_are_made_at_once():
    def build():
        layer = nn.Linear(3, 3)
        layer.register_buffer("sparse", torch.randn(3, 3).relu().to_sparse())
        layer.register_buffer("rows", torch.eye(3).to_sparse_csr())
        layer.register_buffer("product", torch.mm(layer.sparse, torch.randn(3, 2)), persistent=False)
        layer.register_buffer("quantized", torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8))
        layer.nested = torch.nested.nested_tensor([torch.randn(2), torch.randn(3)])
        return layer

    (expected, state), (actual, actual_state) = eager(build), deferred(build)
    assert state == actual_state and fl.is_deferred(actual.weight)
    materialize(actual)
    assert actual.sparse.layout == torch.sparse_coo and actual.rows.layout == torch.sparse_csr
    assert bytes_of(actual.sparse.to_dense()) == bytes_of(expected.sparse.to_dense())
    assert bytes_of(actual.rows.to_dense()) == bytes_of(expected.rows.to_dense())
    assert bytes_of(actual.product) == bytes_of(expected.product)
    assert bytes_of(actual.quantized.int_repr()) == bytes_of(expected.quantized.int_repr())
    for a, b in zip(expected.nested.unbind(), actual.nested.unbind(), strict=True):
        assert bytes_of(a) == bytes_of(b)


def test_reads_import_what_they_need():
    """In a separate process, which has not imported anything that materializes."""
    code = (
        "import torch, firstloss as fl\nwith fl.deferred():\n    tensor = torch.ones(3)\nprint(tensor.numpy().sum())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "3.0\n", done.stderr


def test_torchs_compiler_can_still_be_imported():
    done = subprocess.run(
        [sys.executable, "-c", "import firstloss as fl; fl.deferred_init; import torch._dynamo"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
