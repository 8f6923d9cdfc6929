"""Some of the models in docs/model-steps.md; `python -m tests.lower.model_steps` runs all of them."""

import importlib.util
import warnings

import pytest
import torch

import firstloss as fl

from .model_cases import Case, loss_of, timm_case, transformers_case
from .model_steps import examine

CHOSEN = [
    pytest.param("transformers", "bloom", marks=pytest.mark.sweep),  # no rotary positions, a mask of its own
    ("transformers", "mixtral"),  # a mixture of experts with transformers' own operation
    ("transformers", "mamba2"),  # a state space model, in chunks
    ("transformers", "whisper"),  # audio, and two stacks
    ("torchvision", "shufflenet_v2_x0_5"),  # buffers of batch norms
    pytest.param("timm", "vit_tiny_patch16_224", marks=pytest.mark.sweep),  # includes the one with dropout below
]


@pytest.mark.parametrize("zoo, name", CHOSEN)
def test_loss_gradients_buffers_and_update_match_eager(zoo, name, tmp_path):
    if importlib.util.find_spec(zoo) is None:
        pytest.skip(f"{zoo} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = examine(zoo, name, str(tmp_path))
    assert outcome["verdict"] == "same", outcome["why"]
    assert outcome["tensors"] > 10


def timm_with_drops() -> Case:
    import timm

    plain = timm_case("vit_tiny_patch16_224")
    options = {"drop_rate": 0.2, "drop_path_rate": 0.3, "pos_drop_rate": 0.1, "depth": 2, "embed_dim": 48}
    return Case(lambda: timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=64, **options), plain.batch)


DROPPING = {"bert": lambda: transformers_case("bert", dropout=0.2), "vit_tiny_patch16_224": timm_with_drops}
STEPS = 100


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("bert", marks=pytest.mark.sweep),  # only elementwise dropout; the other also drops paths
        "vit_tiny_patch16_224",
    ],
)
def test_dropout_draws_a_new_mask_at_each_step(name, tmp_path):
    if name != "bert" and importlib.util.find_spec("timm") is None:
        pytest.skip("the zoo is not installed")
    check_dropout(DROPPING[name](), str(tmp_path))


def check_dropout(case: Case, artifacts: str) -> None:
    """Steps with dropout on one batch from the same weights: reproducible, different from each other, distributed as
    eager's."""
    torch.manual_seed(0)
    eager = case.build().train()
    torch.manual_seed(1)
    batch = case.batch(eager)
    expected = torch.tensor([measure(eager, eager, batch) for _ in range(STEPS)])

    backend = fl.backend("XLA", artifact_dir=artifacts)
    torch.manual_seed(0)
    with backend.device:
        model = case.build().train()
    compiled = fl.compile(model, backend)
    step = fl.trace(lambda batch: measure(model, compiled, batch))

    def run(steps: int) -> torch.Tensor:
        torch.manual_seed(7)
        return torch.tensor([[x.item() for x in step(batch)] for _ in range(steps)])

    actual = run(STEPS)
    assert torch.equal(run(3), actual[:3])
    assert len(set(actual[:, 0].tolist())) == STEPS
    for mine, other in zip(actual.T.double(), expected.T.double(), strict=True):
        # Two means of independent draws: five standard errors apart once in a million; the seeds are fixed.
        error = ((mine.var() + other.var()) / STEPS).sqrt()
        assert abs(mine.mean() - other.mean()) < 5 * error
        assert 0.5 < mine.std() / other.std() < 2  # a hundred draws of each


def measure(model, call, batch):
    """The loss, and the norm of all gradients."""
    model.zero_grad()
    loss = loss_of(call(**batch))
    loss.backward()
    size = sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    return loss.detach(), size.sqrt()
