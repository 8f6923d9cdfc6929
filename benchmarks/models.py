"""The models that the benchmarks use."""

from __future__ import annotations

from typing import Any

LLAMA_1B = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LLAMA_100M = {
    "vocab_size": 256,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 9,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
LLAMA_405B = {
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
}
LLAMA_24_LAYERS = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA_TINY = {**LLAMA_24_LAYERS, "num_hidden_layers": 2}


def llama(**fields: int) -> Any:
    """A transformers Llama; call it in `fl.deferred_init` or directly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**fields))


def resnet18() -> Any:
    """A transformers ResNet-18 for 10 classes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = [64, 128, 256, 512]
    config = ResNetConfig(
        layer_type="basic", embedding_size=64, hidden_sizes=widths, depths=[2, 2, 2, 2], num_labels=10
    )
    return ResNetForImageClassification(config)


def import_llama() -> None:
    """Import everything that constructing a Llama imports, and construct a small one to warm up the model's code."""
    llama(**LLAMA_TINY)


def training_step(model: Any, optimizer: Any, backend: Any) -> Any:
    """Compile `model` for `backend`; returns its traced training step, from a batch of tokens to the loss."""
    import firstloss as fl

    compiled = fl.compile(model, backend)

    @fl.trace
    def step(batch: Any) -> Any:
        loss = compiled(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step
