"""Patches of Python's `math`: functions of a step's input numbers give input numbers.

In C they would ask for the value, on which the step would be specialized: a schedule such as
`math.cos(math.pi * iteration / total)` would be compiled at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..compat.patches import MATH_FUNCTIONS, replaces
from .input_numbers import apply_to, is_input_number


@replaces(*(f"math.{name}" for name in MATH_FUNCTIONS))
def math_function(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As the function of `math`."""
    if kwargs or not any(map(is_input_number, args)):
        return original(*args, **kwargs)
    return apply_to(original, args)
