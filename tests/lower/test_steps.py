"""Every operation in one training step of small models, against eager PyTorch on the same operands."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import tiny_llama

from .harness import Recorder, check_step

ADAMW = {
    "adamw": {},
    "adamw, tensor lr": {"lr": torch.tensor(1e-3)},
    "adamw, foreach, amsgrad": {"foreach": True, "amsgrad": True, "maximize": True},
    "adamw, fused": {"fused": True},
}


def record_gradients(model, loss_of):
    model.train()
    with Recorder() as recorder:
        loss_of(model).backward()
    return recorder.calls


def record_update(model, loss_of, make_optimizer):
    """Record the second step: the first creates the optimizer's state."""
    optimizer = make_optimizer(model.parameters())
    for _ in range(2):
        loss_of(model).backward()
        with Recorder() as recorder:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return recorder.calls


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 5), nn.Tanh())


def mlp_loss(model):
    return F.cross_entropy(model(torch.linspace(-2, 2, 24).reshape(3, 8)), torch.tensor([0, 4, 2]))


OPTIMIZERS = {
    **{name: lambda p, how=how: torch.optim.AdamW(p, **how) for name, how in ADAMW.items()},
    "adam": lambda p: torch.optim.Adam(p, fused=True, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, foreach=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, foreach=True, momentum=0.9, centered=True),
    "adamax": lambda p: torch.optim.Adamax(p, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, foreach=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_match_eager(name):
    torch.manual_seed(0)
    assert not check_step(record_update(nn.Linear(8, 5), mlp_loss, OPTIMIZERS[name]))


def test_mlp_matches_eager():
    torch.manual_seed(0)
    assert not check_step(record_gradients(mlp(), mlp_loss))


IDS = torch.arange(16).reshape(2, 8) * 7 % 99


def llama(implementation):
    return tiny_llama.llama(num_hidden_layers=1, attn_implementation=implementation)


def gpt2(implementation):
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=99,
            n_embd=32,
            n_layer=1,
            n_head=4,
            n_positions=16,
            attn_pdrop=0,
            embd_pdrop=0,
            resid_pdrop=0,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation=implementation,
        )
    )


@pytest.mark.parametrize("implementation, dtype", [("eager", torch.float32), ("sdpa", torch.bfloat16)])
@pytest.mark.parametrize("build", [llama, gpt2])
def test_language_models_match_eager(build, implementation, dtype):
    torch.manual_seed(0)
    model = build(implementation).to(dtype)
    assert not check_step(record_gradients(model, lambda m: m(input_ids=IDS, labels=IDS).loss))


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # its gradient before a batch norm is only rounding
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    model = ResNetForImageClassification(config)
    return nn.Sequential(model.resnet.embedder, model.resnet.encoder.stages[0], model.resnet.pooler, nn.Flatten())


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    return ViTForImageClassification(config)


@pytest.mark.parametrize("build", [convnet, resnet, vit])
def test_image_models_match_eager(build):
    torch.manual_seed(0)
    images = torch.randn(2, 3, 32, 32)

    def loss_of(model):
        output = model(images)
        return F.cross_entropy(getattr(output, "logits", output), torch.tensor([0, 1]))

    assert not check_step(record_gradients(build(), loss_of))
