"""Weights in `torch.inference_mode`: deferred, on a backend, and in traced steps, as in eager PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl

USES = {
    "transposed": lambda w: w.t(),
    "a row": lambda w: w[0],
    "rows": lambda w: w[:2],
    "a view": lambda w: w.view(-1),
    "reshaped": lambda w: w.t().reshape(-1),
    "flattened": lambda w: w.flatten(),
    "in bfloat16": lambda w: w.to(torch.bfloat16),
    "in float64": lambda w: w.double(),
    "unchanged by to": lambda w: w.to(torch.float32),
    "detached": lambda w: w.detach(),
    "a clone": lambda w: w.clone(),
    "expanded": lambda w: w[None].expand(3, -1, -1),
    "broadcast": lambda w: torch.broadcast_to(w, (2, *w.shape)),
    "chunks": lambda w: torch.stack(w.chunk(2, 1)),
    "split": lambda w: w.split(2)[1],
    "unbound": lambda w: w.unbind()[1],
    "diagonal": lambda w: w.diagonal(),
    "contiguous": lambda w: w.t().contiguous(),
    "a product": lambda w: F.linear(torch.ones(3, w.shape[1]), w),
    "matmul": lambda w: torch.ones(2, 3, w.shape[0]) @ w,
    "einsum": lambda w: torch.einsum("ij,kj->ik", w, w),
    "a norm": lambda w: w.norm(),
    "layer norm": lambda w: F.layer_norm(w, (w.shape[1],)),
    "cross entropy": lambda w: F.cross_entropy(w, torch.zeros(w.shape[0], dtype=torch.long)),
    "narrow": lambda w: w.narrow(0, 1, 2),
    "T and squeeze": lambda w: w.T[None].squeeze(0),
    "real": lambda w: w.real,
    "tolist": lambda w: torch.tensor(w.tolist()),
    "numpy": lambda w: torch.tensor(w.numpy(force=True)),
    "edited in place": lambda w: w.mul_(2),
    "where": lambda w: torch.where(w > 0, w, 0),
}


def weight():
    torch.manual_seed(0)
    return nn.Linear(6, 4).weight


def on_backend(tmp_path):
    backend = fl.backend("XLA", artifact_dir=str(tmp_path))
    with backend.device:
        module = nn.Module()
        torch.manual_seed(0)
        module.linear = nn.Linear(6, 4)
    fl.compile(module, backend)
    return module.linear.weight


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("where", ["deferred", "on a backend"])
def test_a_weight_in_inference_mode(use, where, tmp_path):
    torch.manual_seed(0)
    actual = fl.deferred_init(nn.Linear, 6, 4).weight if where == "deferred" else on_backend(tmp_path)
    expected = weight()
    with torch.inference_mode():
        result, of_eager = USES[use](actual), USES[use](expected)
    assert result.dtype == of_eager.dtype and torch.equal(result, of_eager)  # there are no NaNs
    assert result.is_inference() == of_eager.is_inference()
    assert not actual.is_inference()
    actual.square().sum().backward()  # the weight itself can be trained
    expected.square().sum().backward()
    assert torch.equal(actual.grad, expected.grad)


@pytest.mark.parametrize("use", [use for use in USES if use not in ("tolist", "numpy", "edited in place")])
@pytest.mark.parametrize("mode", ["inside", "outside"])
def test_a_step_in_inference_mode(use, mode, tmp_path):
    weight_on_backend = on_backend(tmp_path)
    within = torch.inference_mode()

    @fl.trace
    def step(x):
        return USES[use](weight_on_backend).float() + x

    call = within(step) if mode == "outside" else fl.trace(within(step._step))
    x = torch.ones(())
    results = [call(x) for _ in range(3)]
    with within:
        expected = USES[use](weight()).float() + x
    # Sums of six products in another order: a few units in the last place, of values below 16.
    for result in results:
        torch.testing.assert_close(result.clone(), expected.clone(), rtol=1e-5, atol=1e-5)


class Classifier(nn.Module):
    def __init__(self, norm=False, mask_check=True):
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8) if norm else None, mask_check=mask_check)

    def forward(self, tokens):
        return self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0)


BATCHES = {
    "padding on the right": [[3, 4, 5, 0, 0], [1, 2, 3, 4, 5]],
    "padding on the left": [[0, 0, 3, 4, 5], [1, 2, 3, 4, 5]],
    "no padding": [[2, 2, 3, 4, 5], [1, 2, 3, 4, 5]],
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_encoder_with_a_padding_mask_in_evaluation(batch, norm, mode, tmp_path):
    backend = fl.backend("XLA", artifact_dir=str(tmp_path))
    torch.manual_seed(0)
    expected = Classifier(norm).eval()
    torch.manual_seed(0)
    with backend.device:
        model = Classifier(norm)
    compiled = fl.compile(model, backend).eval()

    @fl.trace
    @mode()
    def step(tokens):
        return compiled(tokens)

    tokens = torch.tensor(BATCHES[batch])
    with mode():
        result, outside = expected(tokens), model(tokens)
    torch.testing.assert_close(outside.clone(), result.clone(), rtol=1e-5, atol=1e-5)  # the same kernels
    # The fast path's kernels add in another order, two layers after a layer norm: 1e-5 of values of about 1.
    torch.testing.assert_close(step(tokens).detach().clone(), result.detach().clone(), rtol=1e-5, atol=1e-5)
