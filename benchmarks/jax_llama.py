"""A Llama training step hand-written in JAX, as a JAX user would: layers in a `scan`, FSDP, AdamW.

It has the shapes of transformers' Llama, but other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A weight's largest divisible dimension is sharded over the mesh, except for small weights: Firstloss's default policy.
_SMALL = 4096


def training_step(fields: dict[str, int], mesh: Any) -> tuple[Callable[..., Any], Any, Any]:
    """The jitted step, from the state and a batch of tokens to the new state and the loss; the state; the sharding of
    the batch."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    hidden, inner, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    layers, heads, groups = fields["num_hidden_layers"], fields["num_attention_heads"], fields["num_key_value_heads"]
    width = hidden // heads
    (axis,) = mesh.axis_names

    def sharding(shape: tuple[int, ...], stacked: bool) -> Any:
        own = shape[1:] if stacked else shape
        sizes = [size if size % mesh.size == 0 else 0 for size in own]
        dim = sizes.index(max(sizes)) + stacked
        whole = max(sizes) == 0 or _elements(own) < _SMALL
        return NamedSharding(
            mesh, PartitionSpec(*(axis if d == dim and not whole else None for d in range(len(shape))))
        )

    shapes = {
        "q": (layers, hidden, hidden),
        "k": (layers, hidden, groups * width),
        "v": (layers, hidden, groups * width),
        "o": (layers, hidden, hidden),
        "gate": (layers, hidden, inner),
        "up": (layers, hidden, inner),
        "down": (layers, inner, hidden),
        "before": (layers, hidden),
        "after": (layers, hidden),
    }
    others = {"embedding": (vocabulary, hidden), "norm": (hidden,), "head": (hidden, vocabulary)}
    where = {name: sharding(shape, True) for name, shape in shapes.items()}
    where |= {name: sharding(shape, False) for name, shape in others.items()}

    def initial() -> dict[str, Any]:
        weights = {}
        for number, (name, shape) in enumerate({**shapes, **others}.items()):
            ones = name in ("before", "after", "norm")
            draw = jax.random.normal(jax.random.key(number), shape) * 0.02
            weights[name] = jnp.ones(shape) if ones else draw
        return weights

    def normed(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    def turned(x: Any) -> Any:
        """Rotary embeddings of (batch, length, heads, width)."""
        frequencies = 10000.0 ** (-jnp.arange(0, width, 2) / width)
        angles = jnp.arange(x.shape[1])[:, None] * frequencies
        cos, sin = (jnp.concatenate([part] * 2, -1)[:, None] for part in (jnp.cos(angles), jnp.sin(angles)))
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    def layer(x: Any, weights: dict[str, Any]) -> tuple[Any, None]:
        batch, length, _ = x.shape
        y = normed(x, weights["before"])
        q = turned((y @ weights["q"]).reshape(batch, length, heads, width))
        k = turned((y @ weights["k"]).reshape(batch, length, groups, width))
        v = (y @ weights["v"]).reshape(batch, length, groups, width)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, hidden) @ weights["o"]
        y = normed(x, weights["after"])
        return x + (jax.nn.silu(y @ weights["gate"]) * (y @ weights["up"])) @ weights["down"], None

    def loss_of(weights: dict[str, Any], tokens: Any) -> Any:
        x = weights["embedding"][tokens]
        x, _ = jax.lax.scan(layer, x, {name: weights[name] for name in shapes})
        logits = jax.nn.log_softmax(normed(x, weights["norm"]) @ weights["head"])[:, :-1]
        return -jnp.take_along_axis(logits, tokens[:, 1:, None], -1).mean()

    def step(state: Any, tokens: Any) -> tuple[Any, Any]:
        weights, first, second, count = state
        loss, gradients = jax.value_and_grad(loss_of)(weights, tokens)
        count = count + 1
        rate, beta, gamma = 1e-3, 0.9, 0.999
        first = {n: beta * first[n] + (1 - beta) * g for n, g in gradients.items()}
        second = {n: gamma * second[n] + (1 - gamma) * g * g for n, g in gradients.items()}

        def updated(name: str) -> Any:
            corrected = first[name] / (1 - beta**count)
            scale = jnp.sqrt(second[name] / (1 - gamma**count)) + 1e-8
            return weights[name] * (1 - rate * 0.01) - rate * corrected / scale

        return ({name: updated(name) for name in weights}, first, second, count), loss

    lies = (where, where, where, NamedSharding(mesh, PartitionSpec()))
    rows = NamedSharding(mesh, PartitionSpec(axis))

    def begin() -> Any:
        weights = initial()
        zeros = {name: jnp.zeros_like(weight) for name, weight in weights.items()}
        return weights, zeros, {name: jnp.zeros_like(weight) for name, weight in weights.items()}, jnp.float32(0)

    state = jax.jit(begin, out_shardings=lies)()
    jitted = jax.jit(step, donate_argnums=(0,), in_shardings=(lies, rows), out_shardings=(lies, None))
    return jitted, state, rows


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
