"""Imports every family of rules, which fills `RULES`."""

from . import (  # noqa: F401
    activations,
    attention,
    control_flow,
    convolution,
    distances,
    elementary,
    embeddings,
    factories,
    fft,
    foreach,
    indexing,
    interpolation,
    linalg,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    random,
    rearrange,
    recurrent,
    reductions,
    sorting,
    special_functions,
    views,
)
from .registry import LIST, RULES

__all__ = ["RULES"]


if __name__ == "__main__":
    LIST.write_text("\n".join(sorted(map(str, RULES))) + "\n")
