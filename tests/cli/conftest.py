"""Configurations shared by the tests of several commands."""

import json

import pytest

LLAMA_405B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}


@pytest.fixture
def config_json(tmp_path):
    """Write a config.json with the given fields, and return its path."""
    pytest.importorskip("transformers")

    def write(fields):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return str(path)

    return write


@pytest.fixture
def llama_405b(config_json):
    """The path of the config.json of a Llama with 405 billion parameters, with additional fields."""
    return lambda **fields: config_json({**LLAMA_405B, **fields})
