"""Whole training steps of real models, deferred and traced, against eager PyTorch from the same seed."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import firstloss as fl
from tests.tiny_llama import llama

STEPS = 6
# Both sides compute in float32 and sum in different orders; the losses drift apart by about 1e-7 over a few steps.
LOSS = 1e-5


def tokens():
    return torch.randint(0, 256, (2, 16))


def images():
    return torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,))


def language_loss(model, batch):
    return model(input_ids=batch, labels=batch).loss


def class_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def gpt2(attention, dropout=0.0):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=64,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        attn_implementation=attention,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.Tanh(), nn.Linear(64, 10))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.GroupNorm(4, 16),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


class Transposed(nn.Module):
    """Uses an explicit alias of its weight, which the reference systems cannot compile."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(768, 10)

    def forward(self, x):
        return x.flatten(1) @ self.fc1.weight.T + self.fc1.bias


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-4, nesterov=True)


def train_eagerly(make, batches, loss_of, optimizer_of):
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model.parameters())
    losses = []
    for batch in batches:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def train_traced(backend, make, batches, loss_of, optimizer_of):
    torch.manual_seed(0)
    with backend.device:
        model = make()
    assert fl.is_deferred(model)
    optimizer = optimizer_of(model.parameters())
    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch):
        loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, [float(loss) for loss in [step(batch) for batch in batches]], step


CASES = {
    "llama-sdpa-adamw": (lambda: llama(attn_implementation="sdpa"), tokens, language_loss, adamw),
    "llama-eager-sgd": (lambda: llama(attn_implementation="eager"), tokens, language_loss, sgd),
    "gpt2-sdpa-momentum": (lambda: gpt2("sdpa"), tokens, language_loss, momentum),
    "gpt2-eager-adamw": (lambda: gpt2("eager"), tokens, language_loss, adamw),
    "mlp-sgd": (mlp, images, class_loss, sgd),
    "convolutional-momentum": (convolutional, images, class_loss, momentum),
    "transposed-adamw": (Transposed, images, class_loss, adamw),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_weights_match_eager(case, backend):
    make, batch, loss_of, optimizer_of = CASES[case]
    torch.manual_seed(1)
    batches = [batch() for _ in range(STEPS)]
    expected, losses = train_eagerly(make, batches, loss_of, optimizer_of)
    model, traced, _ = train_traced(backend, make, batches, loss_of, optimizer_of)
    for actual, eager in zip(traced, losses, strict=True):
        assert math.isclose(actual, eager, rel_tol=LOSS)
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    if optimizer_of is adamw:
        return  # Adam divides by the gradient's own size: where the gradient is only rounding noise, the update is too
    for name, eager in expected.state_dict().items():
        # as for the losses, about 1e-7 of the weights' size, 0.02 to 1
        torch.testing.assert_close(state[name].clone(), eager, rtol=1e-4, atol=1e-6)


def test_dropout_draws_new_masks_reproducibly(tmp_path):
    # always compiled: the kernels of a first loss sum in another order
    backend = fl.backend("XLA", artifact_dir=tmp_path, first_loss="compiled")

    def losses():
        torch.manual_seed(1)
        batches = [tokens()] * 3
        _, out, _ = train_traced(
            backend, lambda: gpt2("eager", 0.5), batches, language_loss, lambda p: torch.optim.SGD(p, lr=0.0)
        )
        return out

    first = losses()
    assert len(set(first)) == 3
    assert losses() == first
    # an untrained model's expected loss is log(256) = 5.55; dropout rescales, so it stays near
    assert all(abs(loss - 5.55) < 0.3 for loss in first)
