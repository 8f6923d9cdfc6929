"""Prevention of fused multiply-adds.

PyTorch rounds after every operation. Compilers used by XLA may compute x * y + z with one rounding, and an optimization
barrier does not prevent that, since it is removed before. A comparison with a number that never occurs is kept, because
the compiler cannot know that.
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
