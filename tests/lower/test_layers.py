"""Layers with their own kernels, by the operations of their forward and backward passes."""

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from firstloss.lower.rules import RULES

from .harness import Recorder, assert_rule, assert_same, check_step, to_array, to_tensor

aten = torch.ops.aten


def gradients(function, *inputs):
    """The calls of a forward and backward pass."""
    inputs = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    with Recorder() as recorder:
        output = function(*inputs)
        output = output[0] if isinstance(output, tuple) else output
        (output * torch.linspace(0.5, 1.5, output.numel()).reshape(output.shape)).sum().backward()
    return recorder.calls


def evaluated(function, *inputs):
    with torch.no_grad(), Recorder() as recorder:
        function(*inputs)
    return recorder.calls


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_matches_eager(bidirectional):
    seen = set()
    for overload, args, _, results in gradients(nn.LSTM(5, 4, bidirectional=bidirectional), torch.randn(3, 2, 5)):
        if overload is aten.mkldnn_rnn_layer.default:
            with jax.enable_x64(True):
                actual = RULES[overload](*map(to_array, args))
            for result, expected in zip(actual[:3], results[:3], strict=True):
                assert_same(to_tensor(result, expected.dtype), expected)
            seen.add(overload)
        elif overload is aten.mkldnn_rnn_layer_backward.default:
            assert_rule(overload, args, {}, results)
            seen.add(overload)
    assert len(seen) == 2


def test_gru_and_others_need_no_rule_of_their_own():
    assert not check_step(gradients(nn.GRU(5, 4), torch.randn(3, 2, 5)))
    assert not check_step(gradients(nn.RNN(5, 4), torch.randn(3, 2, 5)))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("mask", [None, "padding", "attention"])
def test_encoder_layer_matches_eager(mask, norm_first):
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=norm_first).eval()
    masks = {
        "padding": {"src_key_padding_mask": torch.arange(6).expand(2, -1) > torch.tensor([[5], [3]])},
        "attention": {"src_mask": torch.ones(6, 6).triu(1).bool()},
    }
    calls = evaluated(lambda x: layer(x, **masks.get(mask, {})), torch.randn(2, 6, 16))
    assert any(call[0] is aten._transformer_encoder_layer_fwd.default for call in calls)
    assert not check_step(calls)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_ctc_matches_eager(joined, zero_infinity):
    """The last sample's target does not fit its input, so its loss is infinite."""
    targets = torch.tensor([[1, 2, 2, 0], [3, 0, 0, 0], [1, 1, 1, 1]])
    inputs, lengths = [9, 7, 5], [3, 1, 4]
    if joined:
        targets = torch.cat([row[:n] for row, n in zip(targets, lengths, strict=True)])
    log_probs = torch.randn(9, 3, 5).log_softmax(-1)
    losses, log_alpha = aten._ctc_loss.default(log_probs, targets, inputs, lengths, 0, zero_infinity)

    with jax.enable_x64(True):
        actual = RULES[aten._ctc_loss.default](
            to_array(log_probs), to_array(targets), inputs, lengths, 0, zero_infinity
        )
    assert_same(to_tensor(actual[0], losses.dtype), losses)
    args = (torch.tensor([1.0, 0.5, 2.0]), log_probs, targets, inputs, lengths, losses, log_alpha, 0, zero_infinity)
    expected = aten._ctc_loss_backward.default(*args)
    assert_rule(aten._ctc_loss_backward.default, args, {}, expected)


def test_rms_norm_matches_eager():
    x, w, g = torch.randn(2, 3, 8), torch.randn(8), torch.randn(2, 3, 8)
    leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = F.rms_norm(leaves[0], [8], leaves[1], 1e-5)
    rstd = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    assert_rule(aten._fused_rms_norm.default, (x, [8], w, 1e-5), {}, (y.detach(), rstd))
    expected = torch.autograd.grad(y, leaves, g)
    assert_rule(aten._fused_rms_norm_backward.default, (g, x, [8], rstd, w, [True, True]), {}, expected)


def test_embedding_with_max_norm_matches_eager():
    weight, indices = torch.randn(5, 4) * 2, torch.tensor([0, 3, 3])
    expected = aten.embedding_renorm.default(weight, indices, 1.0, 2.0)
    assert_rule(aten.embedding_renorm.default, (weight, indices, 1.0, 2.0), {}, expected)


IMAGE, SIGNAL = (2, 4, 9, 9), (2, 4, 9)
LAYERS = {
    "batch norm, 1 dimension": (nn.BatchNorm1d(4), SIGNAL),
    "batch norm, evaluated": (nn.BatchNorm2d(4).eval(), IMAGE),
    "instance norm": (nn.InstanceNorm2d(4, affine=True), IMAGE),
    "local response": (nn.LocalResponseNorm(2), IMAGE),
    "prelu": (nn.PReLU(4), IMAGE),
    "rrelu": (nn.RReLU().eval(), IMAGE),
    "bilinear resize": (nn.Upsample(scale_factor=1.5, mode="bilinear"), IMAGE),
    "circular": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), IMAGE),
    "same": (nn.Conv1d(4, 4, 4, padding="same"), SIGNAL),
    "unfold": (nn.Unfold(3), IMAGE),
    "weight norm": (torch.nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 3)), SIGNAL),
    "attention": (nn.MultiheadAttention(9, 3), None),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_match_eager(name):
    layer, shape = LAYERS[name]
    inputs = [torch.randn(shape)] if shape else [torch.randn(5, 2, 9)] * 3
    assert not check_step(gradients(layer, *inputs))


WITH_WEIGHTS = {
    "linear": (lambda: nn.Linear(6, 8), (5, 6)),
    "convolution": (lambda: nn.Conv2d(6, 16, 3), (2, 6, 9, 9)),
    "convolution, groups": (lambda: nn.Conv1d(6, 12, 3, groups=6), (2, 6, 9)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(6, 8, 3), (2, 6, 5, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "batch norm of images": (lambda: nn.BatchNorm2d(6), (3, 6, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm((4, 6)), (5, 4, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (3, 6, 4, 4)),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), (3, 6, 4, 4)),
    "rms norm": (lambda: nn.RMSNorm(24), (5, 24)),
    "LSTM": (lambda: nn.LSTM(6, 8), (4, 3, 6)),
    "prelu": (lambda: nn.PReLU(6), (5, 6)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (4, 3, 8)),
}


class Scaled(nn.Module):
    """A layer whose input has a gradient."""

    def __init__(self, make, shape):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape[1:]))
        self.layer = make()

    def forward(self, x):
        y = self.layer(x * self.scale)
        return y[0] if isinstance(y, tuple) else y


def trained(backend, name, frozen):
    torch.manual_seed(0)
    make, shape = WITH_WEIGHTS[name]
    with backend.device:
        net = Scaled(make, shape)
    for parameter in frozen:
        net.get_parameter(parameter).requires_grad_(False)
    model = fl.compile(net, backend)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)

    @fl.trace
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.randn(shape, generator=torch.Generator().manual_seed(n))).detach() for n in range(2)]
    return [*losses, *(v.detach().clone() for v in net.state_dict().values())]


@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_layers_with_frozen_weights_are_trained_as_by_eager(name):
    """A backward pass on one CPU device is often one call, which computes only the gradients that are wanted."""
    names = [f"layer.{n}" for n, _ in WITH_WEIGHTS[name][0]().named_parameters()]
    for frozen in [names, names[1:], *([n] for n in names[:3]), ["scale"]]:
        expected = trained(fl.backend("CPU"), name, frozen)
        for actual, eager in zip(trained(fl.backend("XLA"), name, frozen), expected, strict=True):
            torch.testing.assert_close(actual, eager, rtol=1e-4, atol=1e-5)  # XLA sums in another order
