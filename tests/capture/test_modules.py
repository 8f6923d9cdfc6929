"""Every module class of torch.nn and every function of torch.nn.init."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from tests.capture.eager_comparison import assert_same_as_eager, quiet, tensors_of

# Arguments for the classes that require some; a class may be listed several times.
ARGUMENTS: dict[str, list[tuple[tuple, dict]]] = {
    "AdaptiveAvgPool1d": [((3,), {})],
    "AdaptiveAvgPool2d": [((3,), {})],
    "AdaptiveAvgPool3d": [((3,), {})],
    "AdaptiveMaxPool1d": [((3,), {})],
    "AdaptiveMaxPool2d": [((3,), {})],
    "AdaptiveMaxPool3d": [((3,), {})],
    "AdaptiveLogSoftmaxWithLoss": [((8, 20, [5, 10]), {}), ((8, 20, [5, 10]), {"head_bias": True})],
    "AvgPool1d": [((2,), {})],
    "AvgPool2d": [((2,), {})],
    "AvgPool3d": [((2,), {})],
    "BCELoss": [((), {"weight": torch.ones(3)})],
    "BCEWithLogitsLoss": [((), {"pos_weight": torch.ones(3)})],
    "BatchNorm1d": [((4,), {}), ((4,), {"affine": False}), ((4,), {"track_running_stats": False})],
    "BatchNorm2d": [((4,), {})],
    "BatchNorm3d": [((4,), {})],
    "Bilinear": [((3, 4, 5), {})],
    "CircularPad1d": [((1,), {})],
    "CircularPad2d": [((1,), {})],
    "CircularPad3d": [((1,), {})],
    "ConstantPad1d": [((1, 0.0), {})],
    "ConstantPad2d": [((1, 0.0), {})],
    "ConstantPad3d": [((1, 0.0), {})],
    "Conv1d": [((4, 6, 3), {}), ((4, 6, 3), {"groups": 2, "bias": False})],
    "Conv2d": [((4, 6, 3), {}), ((4, 6, 3), {"padding_mode": "reflect", "padding": 1})],
    "Conv3d": [((2, 3, 2), {})],
    "ConvTranspose1d": [((4, 6, 3), {})],
    "ConvTranspose2d": [((4, 6, 3), {})],
    "ConvTranspose3d": [((2, 3, 2), {})],
    "CrossEntropyLoss": [((), {"weight": torch.ones(3)})],
    "CrossMapLRN2d": [((3,), {})],
    "Embedding": [((20, 4), {}), ((20, 4), {"padding_idx": 3, "max_norm": 1.0}), ((5, 2), {"dtype": torch.bfloat16})],
    "EmbeddingBag": [((20, 4), {}), ((20, 4), {"padding_idx": 3})],
    "Fold": [((4, 2), {})],
    "FractionalMaxPool2d": [((2,), {"output_size": 3})],
    "FractionalMaxPool3d": [((2,), {"output_size": 3})],
    "GRU": [((3, 4), {}), ((3, 4), {"num_layers": 2, "bidirectional": True})],
    "GRUCell": [((3, 4), {})],
    "GroupNorm": [((2, 4), {})],
    "InstanceNorm1d": [((4,), {}), ((4,), {"affine": True, "track_running_stats": True})],
    "InstanceNorm2d": [((4,), {})],
    "InstanceNorm3d": [((4,), {})],
    "LPPool1d": [((2, 3), {})],
    "LPPool2d": [((2, 3), {})],
    "LPPool3d": [((2, 3), {})],
    "LSTM": [((3, 4), {}), ((3, 4), {"num_layers": 2, "proj_size": 2}), ((3, 4), {"bias": False})],
    "LSTMCell": [((3, 4), {})],
    "LayerNorm": [((4,), {}), (((2, 3),), {"elementwise_affine": False}), ((4,), {"bias": False})],
    "LazyConv1d": [((4, 3), {})],
    "LazyConv2d": [((4, 3), {})],
    "LazyConv3d": [((4, 3), {})],
    "LazyConvTranspose1d": [((4, 3), {})],
    "LazyConvTranspose2d": [((4, 3), {})],
    "LazyConvTranspose3d": [((4, 3), {})],
    "LazyLinear": [((4,), {})],
    "Linear": [((3, 4), {}), ((3, 4), {"bias": False, "dtype": torch.complex64}), ((300, 400), {})],
    "LocalResponseNorm": [((2,), {})],
    "MaxPool1d": [((2,), {})],
    "MaxPool2d": [((2,), {})],
    "MaxPool3d": [((2,), {})],
    "MaxUnpool1d": [((2,), {})],
    "MaxUnpool2d": [((2,), {})],
    "MaxUnpool3d": [((2,), {})],
    "ModuleDict": [(({},), {})],
    "MultiheadAttention": [((8, 2), {}), ((8, 2), {"kdim": 3, "vdim": 5, "add_bias_kv": True, "bias": False})],
    "NLLLoss": [((), {"weight": torch.ones(3)})],
    "PReLU": [((), {}), ((3,), {"init": 0.1})],
    "PixelShuffle": [((2,), {})],
    "PixelUnshuffle": [((2,), {})],
    "RMSNorm": [((4,), {})],
    "RNN": [((3, 4), {})],
    "RNNBase": [(("LSTM", 3, 4), {})],
    "RNNCell": [((3, 4), {})],
    "ReflectionPad1d": [((1,), {})],
    "ReflectionPad2d": [((1,), {})],
    "ReflectionPad3d": [((1,), {})],
    "ReplicationPad1d": [((1,), {})],
    "ReplicationPad2d": [((1,), {})],
    "ReplicationPad3d": [((1,), {})],
    "SyncBatchNorm": [((4,), {})],
    "Threshold": [((0.1, 20), {})],
    "Transformer": [((8, 2, 1, 2, 16), {})],
    "TransformerDecoder": [((nn.TransformerDecoderLayer(4, 2, 8), 2), {})],
    "TransformerDecoderLayer": [((8, 2, 16), {})],
    "TransformerEncoder": [((nn.TransformerEncoderLayer(4, 2, 8), 2), {"enable_nested_tensor": False})],
    "TransformerEncoderLayer": [((8, 2, 16), {}), ((8, 2, 16), {"norm_first": True, "bias": False})],
    "TripletMarginWithDistanceLoss": [((), {})],
    "ChannelShuffle": [((2,), {})],
    "DataParallel": [((nn.Linear(2, 2),), {})],
    "LinearCrossEntropyLoss": [((4, 6), {})],
    "Unfold": [((2,), {})],
    "Unflatten": [((1, (2, 3)), {})],
    "ZeroPad1d": [((1,), {})],
    "ZeroPad2d": [((1,), {})],
    "ZeroPad3d": [((1,), {})],
    "UpsamplingBilinear2d": [((), {"scale_factor": 2})],
    "UpsamplingNearest2d": [((), {"scale_factor": 2})],
}
ABSTRACT = {
    "Container": "deprecated, and refuses to be instantiated without a warning filter",
    "RNNCellBase": "the base of the cells above",
}


def classes():
    for name, cls in sorted(vars(nn).items()):
        if inspect.isclass(cls) and issubclass(cls, nn.Module) and name not in ABSTRACT:
            for number, (args, kwargs) in enumerate(ARGUMENTS.get(name, [((), {})])):
                yield pytest.param(cls, args, kwargs, id=f"{name}-{number}" if number else name)


@pytest.mark.parametrize("cls, args, kwargs", list(classes()))
def test_modules_match_eager(cls, args, kwargs):
    with quiet():
        has_weights = any(True for _ in cls(*args, **kwargs).parameters())
    # Added because a constructor that creates no tensor at all is an error.
    result = assert_same_as_eager(lambda: [cls(*args, **kwargs), nn.Linear(2, 2)])
    assert has_weights == any(True for _ in result[0].parameters())


def classes_with_weights():
    for param in classes():
        cls, args, kwargs = param.values
        with quiet():
            module = cls(*args, **kwargs)
        if any(True for _ in tensors_of(module)) and not any(_is_lazy(sub) for sub in module.modules()):
            yield param  # torch itself refuses to convert lazy modules


def _is_lazy(module):
    return any(nn.parameter.is_lazy(parameter) for parameter in module.parameters())


@pytest.mark.parametrize("cls, args, kwargs", list(classes_with_weights()))
def test_modules_can_be_reset_and_converted(cls, args, kwargs):
    def build():
        module = nn.ModuleList([cls(*args, **kwargs), nn.Linear(2, 2)])
        for sub in module.modules():
            if callable(getattr(sub, "reset_parameters", None)):
                sub.reset_parameters()
        return module.double().bfloat16()

    assert_same_as_eager(build)


INITIALISERS = {
    "uniform_": {"a": -0.1, "b": 0.3},
    "normal_": {"mean": 0.1, "std": 0.02},
    "trunc_normal_": {"std": 0.6},
    "constant_": {"val": 0.3},
    "ones_": {},
    "zeros_": {},
    "eye_": {},
    "dirac_": {},
    "xavier_uniform_": {"gain": 2.0},
    "xavier_normal_": {},
    "kaiming_uniform_": {"nonlinearity": "relu"},
    "kaiming_normal_": {"mode": "fan_out"},
    "orthogonal_": {"gain": 0.7},
    "sparse_": {"sparsity": 0.3},
}
SHAPES = {"dirac_": [(6, 4, 3), (4, 4, 3, 3)], "eye_": [(5, 7)], "sparse_": [(9, 6)]}


def test_all_initializers_are_tested():
    result = {name for name, fn in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")}
    assert result == INITIALISERS.keys()


@pytest.mark.parametrize("name", INITIALISERS)
@pytest.mark.parametrize("own_generator", [False, True], ids=["global", "own"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_initializers_match_eager(name, own_generator, dtype):
    function = getattr(nn.init, name)
    if own_generator and "generator" not in inspect.signature(function).parameters:
        pytest.skip(f"{name} takes no generator")
    if name == "orthogonal_" and dtype == torch.bfloat16:
        pytest.skip("torch has no QR in bfloat16")

    def build():
        generator = torch.Generator().manual_seed(5) if own_generator else None
        options = {"generator": generator} if own_generator else {}
        out = [torch.randn(3)]
        for shape in SHAPES.get(name, [(6, 4), (4, 6), (30, 40), (300, 700)]):
            weight = nn.Parameter(torch.empty(shape, dtype=dtype))
            out.append(function(weight, **INITIALISERS[name], **options))
        out.append(torch.randn(20, generator=generator))
        out.append(torch.rand(3))
        return out

    assert_same_as_eager(build)


def test_deprecated_initializers_match_eager():
    def build():
        weight = torch.empty(5, 6)
        return [getattr(nn.init, name)(weight.clone()) for name in ("xavier_uniform", "kaiming_normal", "orthogonal")]

    assert_same_as_eager(build)
