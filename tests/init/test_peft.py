"""LoRA adapters (peft) on a deferred model, added after construction or inside it."""

import pytest
import torch

import firstloss as fl
from tests.capture.eager_comparison import assert_same
from tests.tiny_llama import llama

peft = pytest.importorskip("peft", reason="peft is not installed: make test installs it")
pytest.importorskip("transformers")

CONFIGURATIONS = {
    "plain": {},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    # initialized from a singular value decomposition of the weight, which reads it
    "pissa": {"init_lora_weights": "pissa"},
    "dora": {"use_dora": True},  # initialized from the weight's norms
    "a module saved beside": {"use_rslora": True, "modules_to_save": ["lm_head"]},
}


def adapt(model, options):
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **options))


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "afterwards"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_adapters_match_eager(name, inside):
    options = CONFIGURATIONS[name]
    torch.manual_seed(0)
    eager = adapt(llama(), options)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    if inside:
        deferred = fl.deferred_init(lambda: adapt(llama(), options))
    else:
        deferred = adapt(fl.deferred_init(llama), options)
    assert torch.equal(torch.get_rng_state(), state)
    if inside or name != "dora":  # computes norms of weights and real tensors together: a use outside a capture
        assert fl.is_deferred(deferred.base_model.model.model.embed_tokens.weight)
    fl.materialize_module(deferred)
    for (a_name, a), (b_name, b) in zip(eager.named_parameters(), deferred.named_parameters(), strict=True):
        assert a_name == b_name and a.requires_grad == b.requires_grad
        assert_same(a, b)
    ids = torch.arange(20)[None]
    losses = [model(input_ids=ids, labels=ids).loss for model in (eager, deferred)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    for a, b in zip(eager.parameters(), deferred.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad))
