"""A Llama and a ResNet-18 in idiomatic Flax NNX, for comparison in `step_speed`.

Their parameters correspond one to one to those of transformers' LlamaForCausalLM and torchvision's resnet18.
"""

from __future__ import annotations

from typing import Any

import jax
import optax
from flax import nnx
from jax import numpy as jnp

BASE = 10000.0  # of the rotary positions


class Attention(nnx.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.q = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.k = nnx.Linear(width, kv_heads * self.size, use_bias=False, rngs=rngs)
        self.v = nnx.Linear(width, kv_heads * self.size, use_bias=False, rngs=rngs)
        self.o = nnx.Linear(width, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        q = rotated(self.q(x).reshape(batch, length, self.heads, self.size), cos, sin)
        k = rotated(self.k(x).reshape(batch, length, self.kv_heads, self.size), cos, sin)
        v = self.v(x).reshape(batch, length, self.kv_heads, self.size)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.reshape(batch, length, width))


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    turned = jnp.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]


class Layer(nnx.Module):
    def __init__(self, fields: dict[str, int], rngs: nnx.Rngs) -> None:
        width, inner = fields["hidden_size"], fields["intermediate_size"]
        self.before = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.attention = Attention(width, fields["num_attention_heads"], fields["num_key_value_heads"], rngs)
        self.after = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.gate = nnx.Linear(width, inner, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(width, inner, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(inner, width, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        x = x + self.attention(self.before(x), cos, sin)
        y = self.after(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    def __init__(self, fields: dict[str, int], rngs: nnx.Rngs) -> None:
        width = fields["hidden_size"]
        self.embedding = nnx.Embed(fields["vocab_size"], width, rngs=rngs)
        self.layers = nnx.List([Layer(fields, rngs) for _ in range(fields["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, fields["vocab_size"], use_bias=False, rngs=rngs)
        self.size = width // fields["num_attention_heads"]

    def __call__(self, ids: jax.Array) -> jax.Array:
        rates = BASE ** -(jnp.arange(0, self.size, 2) / self.size)
        angles = jnp.arange(ids.shape[1])[:, None] * rates
        angles = jnp.concatenate([angles, angles], -1)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def loss(self, ids: jax.Array) -> jax.Array:
        logits = self(ids)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def conv(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    edge = size // 2
    return nnx.Conv(inputs, outputs, (size, size), stride, padding=[(edge, edge)] * 2, use_bias=False, rngs=rngs)


class Block(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs) -> None:
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride, rngs), nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.conv2, self.norm2 = conv(outputs, outputs, 3, 1, rngs), nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        self.has_shortcut = stride > 1 or inputs != outputs
        if self.has_shortcut:
            self.conv3 = conv(inputs, outputs, 1, stride, rngs)
            self.norm3 = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return nnx.relu(y + (self.norm3(self.conv3(x)) if self.has_shortcut else x))


class ResNet18(nnx.Module):
    def __init__(self, classes: int, rngs: nnx.Rngs) -> None:
        self.conv, self.norm = conv(3, 64, 7, 2, rngs), nnx.BatchNorm(64, momentum=0.9, rngs=rngs)
        widths = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        self.blocks = nnx.List([b for i, o, s in widths for b in (Block(i, o, s, rngs), Block(o, o, 1, rngs))])
        self.head = nnx.Linear(512, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.norm(self.conv(x)))
        x = nnx.max_pool(x, (3, 3), (2, 2), [(1, 1), (1, 1)])
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))

    def loss(self, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self(batch[0]), batch[1]).mean()


def stepper(model: Any, transformation: optax.GradientTransformation) -> Any:
    """A function of the batch that trains `model` for a step and returns its loss: split, jitted and donated."""
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def step(state: Any, batch: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(lambda m: m.loss(batch))(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    compiled = jax.jit(step, donate_argnums=0)

    def run(batch: Any) -> jax.Array:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    return run
