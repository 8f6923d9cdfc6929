"""The shared tiny Llama; tests use other sizes only if the size matters."""

from __future__ import annotations

from typing import Any

import pytest

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def config(**fields: Any) -> Any:
    """The configuration of `llama`."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(**{**SIZES, **fields})


def llama(**fields: Any) -> Any:
    """A transformers language model; `fields` override its configuration."""
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(config(**fields))
