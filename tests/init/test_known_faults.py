"""Faults of initialization that other projects have had: `check_init` names them, and a deferred model has none.

- torchtitan's backend for models of transformers constructs on meta, calls `to_empty` and `_init_weights`, and loads a
  checkpoint. None of it wrote rotary frequencies, which a constructor computes into a buffer that is not saved: they
  were zeros, no token knew its position, and the loss stayed near that of random weights. A comment in `init_states` of
  torchtitan 0.3.0, which computes them since, tells of it. The model here is such a one, cut down.
- `_init_weights` of some models of transformers forgets weights: two of today's are here as they are.
"""

import pytest
import torch
import transformers
from torch import nn

import firstloss as fl
from firstloss.cli.check_init import tensors_of

WIDTH, TOKENS = 16, 12


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), self.inv_freq)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(TOKENS, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.rotary_emb = Rotary()
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens):
        q, k, v = self.qkv(self.embed_tokens(tokens)).chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(self.rotary_emb(q), self.rotary_emb(k), v, is_causal=True)
        return nn.functional.cross_entropy(self.lm_head(y)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(std=0.02)

    def init_states(self):
        self.apply(self._init_weights)
        self.lm_head.weight = self.embed_tokens.weight


def start(context, checkpoint):
    """As torchtitan's trainer."""
    with context:
        model = Decoder()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_states()
    model.load_state_dict(checkpoint)
    return model


def test_rotary_frequencies_that_torchtitan_left_unwritten():
    torch.manual_seed(0)
    trained = Decoder()
    tokens = torch.arange(TOKENS).repeat(2, 2)
    checkpoint = trained.state_dict()
    with fl.check_init("report") as check:
        model = start(torch.device("meta"), checkpoint)
        model(tokens).backward()
    (found,) = check.unwritten
    assert (found.name, found.kind) == ("rotary_emb.inv_freq", "non-persistent buffer")
    assert found.owner.startswith("Rotary at ") and found.owner.partition(":")[0].endswith("test_known_faults.py")
    assert "outer" in line_at(found.read) and "to_empty" in line_at(found.handed_out)
    model.rotary_emb.inv_freq.zero_()  # as fresh memory is
    assert model(tokens).item() != trained(tokens).item()
    deferred = start(fl.deferred(preserve_rng_state=True), checkpoint)
    fl.materialize_module(deferred)
    assert deferred(tokens).item() == trained(tokens).item()


def line_at(source):
    with open(source.file, encoding="utf-8") as file:
        return file.read().splitlines()[source.line - 1]


SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def clip():
    vision = {**SMALL, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=vision, projection_dim=8))


def dpr():
    return transformers.DPRQuestionEncoder(transformers.DPRConfig(**SMALL, vocab_size=32))


BERT = "question_encoder.bert_model.embeddings"
MODELS = {
    "CLIPModel": (clip, {"logit_scale"}),
    "DPRQuestionEncoder": (dpr, {f"{BERT}.position_ids", f"{BERT}.token_type_ids"}),
}


@pytest.mark.parametrize("make, unwritten", MODELS.values(), ids=MODELS)
def test_what_transformers_leaves_unwritten(make, unwritten):
    torch.manual_seed(0)
    eager = make()
    with fl.check_init("report") as check:
        with torch.device("meta"):
            model = make()
        model.to_empty(device="cpu")
        model.apply(model._init_weights)
    assert {weight.name for weight in check.unwritten} == unwritten
    with fl.deferred():
        deferred = make()
    deferred.to_empty(device="cpu")
    deferred.apply(deferred._init_weights)
    fl.materialize_module(deferred)
    expected, actual = tensors_of(eager), tensors_of(deferred)
    assert all(torch.equal(actual[name], expected[name]) for name in unwritten)
