"""Random operations inside a step.

Each takes `rng_key`, which the driver derives from the run's seed, the step's number and the operation's index in the
step: the same on every mesh, and different at every step. The numbers are not those of PyTorch's generator, which a
compiled step does not have, but have the same distributions.
"""

from __future__ import annotations

import math

import jax
import numpy as np
import torch
from jax import lax
from jax import numpy as jnp
from torch.ops import aten

from .dtypes import cast, floating, is_complex, operands, opmath, to_jax, where
from .registry import rule
from .threefry import by_call

_FLOAT = np.dtype(np.float32)


def _unit(rng_key, shape, dtype=_FLOAT):
    """In [0, 1), to be compared with a probability: in float32, of which an accelerator draws more at a time."""
    return jax.random.uniform(by_call(rng_key), shape, dtype)


def _uniform(rng_key, shape, dtype, low=0.0, high=1.0):
    # Drawn at least in float32: a half-precision uniform would round up to `high` too often.
    wide = opmath(dtype)
    return cast(jax.random.uniform(by_call(rng_key), shape, wide, low, high), dtype)


def _normal(rng_key, shape, dtype, mean=0.0, std=1.0):
    wide = opmath(dtype)
    return cast(jax.random.normal(by_call(rng_key), shape, wide) * cast(std, wide) + cast(mean, wide), dtype)


def _result_dtype(dtype):
    return to_jax(dtype or torch.get_default_dtype())


def _of_probability(p, drawn, dtype):
    """`drawn`, or NaN, if the dtype has it, where `p` is not a probability; eager PyTorch raises."""
    return drawn if dtype.kind in "biu" else where((p >= 0) & (p <= 1), cast(drawn, dtype), np.nan)


@rule(aten.bernoulli.p)
def bernoulli_p(self, p=0.5, *, rng_key):
    return _unit(rng_key, self.shape) < cast(p, _FLOAT)


@rule(aten.bernoulli.Tensor)
def bernoulli_tensor(self, p, *, rng_key):
    p = jnp.broadcast_to(p, self.shape)
    return _of_probability(p, _unit(rng_key, self.shape, opmath(floating(p.dtype))) < p, self.dtype)


@rule(aten.bernoulli.default)
def bernoulli(self, *, rng_key):
    return _of_probability(self, _unit(rng_key, self.shape, opmath(self.dtype)) < self, self.dtype)


@rule(aten.native_dropout.default)
def native_dropout(input, p, train, *, rng_key):
    if not train:
        return input, lax.full(input.shape, True, bool)
    mask = _unit(rng_key, input.shape) >= cast(p, _FLOAT)
    wide = opmath(input.dtype)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    return cast(cast(input, wide) * mask * cast(scale, wide), input.dtype), mask


@rule(aten.uniform.default)
def uniform(self, low=0.0, high=1.0, *, rng_key):
    if is_complex(self.dtype):  # both real and imaginary part
        parts = _uniform(rng_key, (2, *self.shape), np.finfo(self.dtype).dtype, low, high)
        return lax.complex(parts[0], parts[1])
    return _uniform(rng_key, self.shape, self.dtype, low, high)


@rule(aten.normal_functional.default)
def normal(self, mean=0.0, std=1.0, *, rng_key):
    return _normal(rng_key, self.shape, self.dtype, mean, std)


@rule(aten.normal.Tensor_Tensor, aten.normal.Tensor_float, aten.normal.float_Tensor)
def normal_around(mean, std=1.0, *, rng_key):
    mean, std = operands(mean, std)
    drawn = _normal(rng_key, mean.shape, mean.dtype) * std + mean
    return where(std >= 0, drawn, np.nan)  # eager PyTorch raises


@rule(aten.normal.float_float)
def normal_float_float(mean, std, size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return _normal(rng_key, size, _result_dtype(dtype), mean, std)


@rule(aten.exponential.default)
def exponential(self, lambd=1.0, *, rng_key):
    return cast(jax.random.exponential(by_call(rng_key), self.shape, opmath(self.dtype)) / lambd, self.dtype)


@rule(aten.cauchy.default)
def cauchy(self, median=0.0, sigma=1.0, *, rng_key):
    return cast(jax.random.cauchy(by_call(rng_key), self.shape, opmath(self.dtype)) * sigma + median, self.dtype)


@rule(aten.log_normal.default)
def log_normal(self, mean=1.0, std=2.0, *, rng_key):
    return cast(jnp.exp(_normal(rng_key, self.shape, opmath(self.dtype), mean, std)), self.dtype)


@rule(aten.geometric.default)
def geometric(self, p, *, rng_key):
    """The number of trials up to and including the first success."""
    wide = opmath(floating(self.dtype))
    u = jax.random.uniform(by_call(rng_key), self.shape, wide)  # in [0, 1)
    return cast(jnp.ceil(jnp.maximum(jnp.log1p(-u) / cast(math.log1p(-p), wide), jnp.finfo(wide).tiny)), self.dtype)


@rule(aten.rand.default)
def rand(size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return _uniform(rng_key, size, _result_dtype(dtype))


@rule(aten.randn.default)
def randn(size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return _normal(rng_key, size, _result_dtype(dtype))


@rule(aten.rand_like.default)
def rand_like(self, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, rng_key):
    return _uniform(rng_key, self.shape, to_jax(dtype) if dtype else self.dtype)


@rule(aten.randn_like.default)
def randn_like(self, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None, rng_key):
    return _normal(rng_key, self.shape, to_jax(dtype) if dtype else self.dtype)


@rule(aten.randint_like.default)
def randint_like(self, high, *, dtype=None, rng_key, **_):
    return jax.random.randint(by_call(rng_key), self.shape, 0, high, jnp.int64)


@rule(aten.randint_like.low_dtype)
def randint_like_low(self, low, high, *, dtype=None, rng_key, **_):
    return jax.random.randint(by_call(rng_key), self.shape, low, high, jnp.int64)


@rule(aten.randint.default)
def randint(high, size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return randint_low(0, high, size, dtype=dtype, rng_key=rng_key)


@rule(aten.randint.low)
def randint_low(low, high, size, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return cast(jax.random.randint(by_call(rng_key), size, low, high, jnp.int64), to_jax(dtype or torch.int64))


@rule(aten.randperm.default)
def randperm(n, *, dtype=None, layout=None, device=None, pin_memory=None, rng_key):
    return cast(jax.random.permutation(by_call(rng_key), n), to_jax(dtype or torch.int64))


# The limit up to which each dtype represents all integers: PyTorch's `random_` draws below it.
_WHOLE = {np.dtype(np.float64): 1 << 53, np.dtype(np.float32): 1 << 24, np.dtype(np.float16): 1 << 11}


@rule(aten.random.default)
def random(self, *, rng_key):
    dtype = self.dtype
    high = 2 if dtype.kind == "b" else jnp.iinfo(dtype).max if dtype.kind in "iu" else _WHOLE.get(dtype, 1 << 8)
    return cast(jax.random.randint(by_call(rng_key), self.shape, 0, high, jnp.int64), dtype)


@rule(getattr(aten.random, "from"))
def random_from(self, low, high=None, *, rng_key):
    top = jnp.iinfo(self.dtype).max if self.dtype.kind in "iu" else _WHOLE.get(self.dtype, 1 << 8)
    return jax.random.randint(by_call(rng_key), self.shape, low, top if high is None else high, jnp.int64)


@rule(aten.random.to)
def random_to(self, to, *, rng_key):
    return jax.random.randint(by_call(rng_key), self.shape, 0, to, jnp.int64)


@rule(aten.multinomial.default)
def multinomial(self, num_samples, replacement=False, *, rng_key):
    """Without replacement: the largest log-weights with Gumbel noise (Vieira, 2014)."""
    logits = jnp.log(cast(self, opmath(self.dtype)))
    rows = self.shape[:-1]
    if replacement:
        drawn = jax.random.categorical(by_call(rng_key), logits, axis=-1, shape=(num_samples, *rows))
        return jnp.moveaxis(drawn, 0, -1)
    return lax.top_k(logits + jax.random.gumbel(by_call(rng_key), logits.shape, logits.dtype), num_samples)[1]


@rule(aten.poisson.default)
def poisson(self, *, rng_key):
    return jax.random.poisson(rng_key, cast(self, opmath(self.dtype)), self.shape, jnp.int64)


@rule(aten._standard_gamma.default)
def _standard_gamma(self, *, rng_key):
    return jax.random.gamma(rng_key, cast(self, opmath(self.dtype)))


@rule(aten._sample_dirichlet.default)
def _sample_dirichlet(self, *, rng_key):
    return jax.random.dirichlet(rng_key, cast(self, opmath(self.dtype)))


@rule(aten._standard_gamma_grad.default)
def _standard_gamma_grad(self, output):
    """By implicit differentiation of the distribution function (Figurnov and others, 2018)."""
    return lax.random_gamma_grad(cast(self, opmath(self.dtype)), cast(output, opmath(self.dtype)))


@rule(aten.binomial.default)
def binomial(count, prob, *, rng_key):
    return jax.random.binomial(rng_key, cast(count, opmath(count.dtype)), cast(prob, opmath(prob.dtype)))
