"""A few of the models of docs/model-steps.md; `python -m tests.lower.model_steps` runs them all."""

import warnings

import pytest

from .model_steps import examine

CHOSEN = [
    ("transformers", "bloom"),  # no rotary positions, a triangular mask of its own
    ("transformers", "mixtral"),  # a mixture of experts, through transformers' own operation
]


@pytest.mark.parametrize("zoo, name", CHOSEN, ids=[name for _, name in CHOSEN])
def test_loss_and_gradients_are_eagers(zoo, name, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = examine(zoo, name, str(tmp_path))
    assert outcome["verdict"] == "same", outcome["why"]
    assert outcome["parameters"] > 10
