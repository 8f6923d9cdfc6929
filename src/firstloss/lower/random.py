"""Random operations inside a step.

Each takes `rng_key`, made by the driver of the run's seed, the step's number and the operation's place in the step: the
same on every mesh, another at every step. The numbers are not those of PyTorch's generator, which a compiled step has
none of; their distributions are.
"""

from __future__ import annotations

import jax
import torch
from jax import lax
from jax import numpy as jnp

from .dtypes import cast, opmath, to_jax
from .registry import rule

aten = torch.ops.aten


def _uniform(rng_key, shape, dtype, low=0.0, high=1.0):
    # drawn in float32 at least: a half-precision uniform would round up to `high` too often
    wide = opmath(dtype)
    return cast(jax.random.uniform(rng_key, shape, wide, low, high), dtype)


def _normal(rng_key, shape, dtype, mean=0.0, std=1.0):
    wide = opmath(dtype)
    return cast(jax.random.normal(rng_key, shape, wide) * cast(std, wide) + cast(mean, wide), dtype)


def _result_dtype(dtype):
    return to_jax(dtype or torch.get_default_dtype())


@rule(aten.bernoulli.p)
def bernoulli_p(self, p=0.5, *, rng_key):
    return jax.random.uniform(rng_key, self.shape) < p


@rule(aten.bernoulli.Tensor)
def bernoulli_tensor(self, p, *, rng_key):
    return jax.random.uniform(rng_key, self.shape) < jnp.broadcast_to(p, self.shape)


@rule(aten.bernoulli.default)
def bernoulli(self, *, rng_key):
    return jax.random.uniform(rng_key, self.shape, opmath(self.dtype)) < self


@rule(aten.native_dropout.default)
def native_dropout(input, p, train, *, rng_key):
    if not train:
        return input, lax.full(input.shape, True, bool)
    kept = jax.random.uniform(rng_key, input.shape) >= p
    wide = opmath(input.dtype)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return cast(cast(input, wide) * kept * cast(scale, wide), input.dtype), kept


@rule(aten.uniform.default)
def uniform(self, low=0.0, high=1.0, *, rng_key):
    return _uniform(rng_key, self.shape, self.dtype, low, high)


@rule(aten.normal_functional.default)
def normal(self, mean=0.0, std=1.0, *, rng_key):
    return _normal(rng_key, self.shape, self.dtype, mean, std)


@rule(aten.exponential.default)
def exponential(self, lambd=1.0, *, rng_key):
    return cast(jax.random.exponential(rng_key, self.shape, opmath(self.dtype)) / lambd, self.dtype)


@rule(aten.rand.default)
def rand(size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return _uniform(rng_key, size, _result_dtype(dtype))


@rule(aten.randn.default)
def randn(size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return _normal(rng_key, size, _result_dtype(dtype))


@rule(aten.randint.default)
def randint(high, size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return randint_low(0, high, size, dtype=dtype, rng_key=rng_key)


@rule(aten.randint.low)
def randint_low(low, high, size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return cast(jax.random.randint(rng_key, size, low, high, jnp.int64), to_jax(dtype or torch.int64))


@rule(aten.randperm.default)
def randperm(n, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return cast(jax.random.permutation(rng_key, n), to_jax(dtype or torch.int64))
