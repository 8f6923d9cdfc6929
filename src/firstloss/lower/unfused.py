"""Prevention of two kinds of fusion.

Multiply-adds: PyTorch rounds after every operation. Compilers used by XLA may compute x * y + z with one rounding, and
an optimization barrier does not prevent that, since it is removed before. A comparison with a number that never occurs
is kept, because the compiler cannot know that.

Operations that XLA fuses into each of their readers, which compute them again: for every element if it is broadcast.
XLA on a CPU never does that to a reduction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp


def unfused(x: Any) -> Any:
    """`x`, rounded before it is used. Complex numbers are returned unchanged."""
    if x.dtype not in (np.float32, np.float64):
        return x  # narrower dtypes are rounded by a cast
    lowest = np.finfo(x.dtype).min
    return jnp.where(x == -np.inf, x, lax.max(x, lowest))


def computed_once(x: Any) -> Any:
    """`x`, which is stored in memory. Complex numbers are returned unchanged."""
    if x.dtype.kind not in "iuf":
        return x
    lowest = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    return lax.reduce_max(lax.concatenate([x[None], lax.full_like(x, lowest)[None]], 0), (0,))
