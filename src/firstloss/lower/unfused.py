"""Keep a product from being fused with the sum that follows it.

PyTorch rounds after every operation. Compilers under XLA may compute x * y + z with one rounding, and an optimization
barrier does not stop them, since it is gone by then. A comparison with a number that is never met is still there, and
nobody can know that it is never met.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import lax
from jax import numpy as jnp


def unfused(x: Any) -> Any:
    """`x`, rounded before anything is done with it. Not for complex numbers, which are returned as they are."""
    if x.dtype not in (np.float32, np.float64):
        return x  # narrower ones are rounded by a cast
    lowest = np.finfo(x.dtype).min
    return jnp.where(x == -np.inf, x, lax.max(x, lowest))
