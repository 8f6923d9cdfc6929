"""Generate the table of `src/firstloss/rng/_erfinv_table.h`: `python -m tests.rng.fit_erfinv` prints it.

erfinv(x) / x is even and smooth up to the singularities at 1 and -1. 1 - |x| is split at the powers of two, and each
part into four, so that each interval is far from the singularity relative to its length; there the Chebyshev
interpolation of degree 6 in t = |x| - centre is accurate to 2e-10.
"""

from pathlib import Path

import numpy as np
from numpy.polynomial import Chebyshev, Polynomial
from scipy.special import erfinv

PATH = Path(__file__).parents[2] / "src" / "firstloss" / "rng" / "_erfinv_table.h"
OCTAVES, PARTS, DEGREE = 8, 4, 6
ROWS = ("centre", "c0", "c0_low", "c1", "c1_low", "c2", "c3", "c4", "c5", "c6")


def place(u):
    """The row of 1 - |x| = u: the last bits of its exponent and the first two of its mantissa."""
    return (np.asarray(u, np.float32).view(np.uint32) >> 21) & 31


def ratio(x):
    """erfinv(x) / x."""
    return np.where(np.abs(x) < 1e-8, np.sqrt(np.pi) / 2, erfinv(x) / np.where(x == 0, 1, x))


def fit(low, high, centre):
    """Coefficients in |x| - centre, on low <= |x| <= high."""
    if centre == 0:
        low = -high  # an even function: tell the fit
    nodes = (np.cos(np.pi * (np.arange(64) + 0.5) / 64) + 1) / 2 * (high - low) + low
    fitted = Chebyshev.fit(nodes - centre, ratio(nodes), DEGREE, domain=[low - centre, high - centre])
    return fitted.convert(kind=Polynomial).coef


def table():
    """float32 numbers, of shape (10, 32): a row of ROWS, a column per interval."""
    coefficients = np.zeros((len(ROWS), OCTAVES * PARTS), np.float32)
    for octave in range(OCTAVES):
        for part in range(PARTS):
            bottom = 2.0 ** -(octave + 1) * (1 + part / PARTS)
            top = 2.0 ** -(octave + 1) * (1 + (part + 1) / PARTS)
            low, high = 1 - top, 1 - bottom
            centre = np.float32((low + high) / 2 if low else 0.0)
            c = fit(low, high, float(centre))
            high_parts = c[:2].astype(np.float32)
            column = [centre]
            for number, rounded in zip(c[:2], high_parts, strict=True):
                column += [rounded, np.float32(number - float(rounded))]
            coefficients[:, place(bottom)] = [*column, *c[2:].astype(np.float32)]
    return coefficients


def largest_error(x):
    """The table's largest error, computed in float64 at the numbers x, 0 <= x <= 1 - 2^-8, in float32 spacings."""
    numbers = table().astype(np.float64)[:, place(np.minimum(1 - x, 1 - 2.0**-24))]
    t = x - numbers[0]
    values = numbers[-1]
    for name, row in zip(ROWS[-2:4:-1], numbers[-2:4:-1], strict=True):
        assert name in ("c5", "c4", "c3", "c2")
        values = values * t + row
    values = (values * t + numbers[3] + numbers[4]) * t + numbers[1] + numbers[2]
    return np.max(np.abs(values / ratio(x) - 1)) * 2**24


def written(numbers):
    """The header's text."""
    lines = ["/* Written by tests/rng/fit_erfinv.py, which says what these are. */", ""]
    for name, row in zip(ROWS, numbers, strict=True):
        lines.append(f"static const float {name}[32] ALIGNED = {{")
        for i in range(0, 32, 4):
            lines.append("    " + " ".join(f"{float(n).hex()}f," for n in row[i : i + 4]))
        lines += ["};", ""]
    return "\n".join(lines[:-1])


if __name__ == "__main__":
    print(written(table()))
