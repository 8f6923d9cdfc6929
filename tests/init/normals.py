"""How near to eager PyTorch's normals XLA's are on this machine."""

import numpy as np
import torch

# Without AVX2 PyTorch computes normals with the C library's functions; XLA always does by the polynomials that it uses
# with AVX2.
EXACT = torch.backends.cpu.get_cpu_capability() != "DEFAULT"


def as_near_as_possible(actual, expected) -> bool:
    """Whether normals, or what is computed from them, have the same bits; where that is impossible, whether they are
    within 8 units in the last place of the largest (5 of a standard normal, scaled and rounded), or the next number in
    half precision."""
    if actual.tobytes() == expected.tobytes():
        return True
    if EXACT or expected.dtype.kind in "biu":
        return False
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    unit = 2.0**-7 if expected.dtype.itemsize == 2 else 8 * 2.0**-23
    return bool((np.abs(a - b) <= unit * np.abs(b).max()).all())
