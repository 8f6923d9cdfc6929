"""A Llama training step in Flax NNX, as in its guides: `nnx.vmap` and `nnx.scan` over layers, FSDP, AdamW of optax.

It has the shapes of transformers' Llama, but other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import flax_models

# Weights with fewer elements are replicated, as by Firstloss's default policy.
_SMALL = 4096


class Llama(nnx.Module):
    def __init__(self, fields: dict[str, int], rngs: nnx.Rngs) -> None:
        width, layers = fields["hidden_size"], fields["num_hidden_layers"]

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Any:
            return flax_models.Layer(fields, rngs)

        self.embedding = nnx.Embed(fields["vocab_size"], width, rngs=rngs)
        self.layers = stacked(rngs)
        self.norm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, fields["vocab_size"], use_bias=False, rngs=rngs)
        self.size = width // fields["num_attention_heads"]

    def loss(self, ids: jax.Array) -> jax.Array:
        rates = flax_models.BASE ** -(jnp.arange(0, self.size, 2) / self.size)
        angles = jnp.arange(ids.shape[1])[:, None] * rates
        angles = jnp.concatenate([angles, angles], -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, layer: Any) -> jax.Array:
            return layer(x, cos, sin)

        logits = self.head(self.norm(forward(self.embedding(ids), self.layers)))[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def training_step(fields: dict[str, int], mesh: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Like `jax_llama.training_step`."""
    (axis,) = mesh.axis_names

    def begin() -> Any:
        model = Llama(fields, nnx.Rngs(0))
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))

    graph, state = begin()

    def sharding(path: Any, leaf: Any) -> Any:
        stacked = "layers" in jax.tree_util.keystr(path)
        own = leaf.shape[stacked:]
        sizes = [size if size % mesh.size == 0 else 0 for size in own]
        elements = 1
        for size in own:
            elements *= size
        if max(sizes, default=0) == 0 or elements < _SMALL:
            return NamedSharding(mesh, PartitionSpec())
        dim = sizes.index(max(sizes)) + stacked
        return NamedSharding(mesh, PartitionSpec(*(axis if d == dim else None for d in range(leaf.ndim))))

    lies = jax.tree_util.tree_map_with_path(sharding, state)
    state = jax.device_put(state, lies)
    rows = NamedSharding(mesh, PartitionSpec(axis))

    def step(state: Any, ids: jax.Array) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda m: m.loss(ids))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    jitted = jax.jit(step, donate_argnums=(0,), in_shardings=(lies, rows), out_shardings=(lies, None))
    return jitted, state, rows
