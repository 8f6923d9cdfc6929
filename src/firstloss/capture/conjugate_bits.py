"""The conjugate and negative bits that a tensor in a mirror would have in PyTorch (see `conjugate_views.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.ops import aten

from ..program.graph import geometry_of


class Bits(NamedTuple):
    """Lazy bits; `alternating`: every second element is negated, which is not a view in PyTorch."""

    conjugated: bool = False
    negated: bool = False
    alternating: bool = False


NONE = Bits()


def lazy_bits(tensor: Any) -> Bits:
    """The lazy bits of a deferred tensor."""
    storage = tensor._storage
    if storage.mirrors is None:
        return NONE
    negated = conjugated = False
    while storage.mirrors is not None:
        negated ^= storage.mirrors.computed_by is aten.neg.default
        conjugated ^= storage.mirrors.computed_by is aten._conj_physical.default
        storage = storage.mirrors.of
    size, stride, offset, dtype = geometry_of(tensor)
    if not conjugated or dtype.is_complex:
        return Bits(conjugated, negated)
    # `x.conj().imag` is the negated `x.imag`; here it is a view of a storage in which every second number is negated.
    if not all(n == 1 or s % 2 == 0 for n, s in zip(size, stride, strict=True)):
        return Bits(negated=negated, alternating=True)
    return Bits(negated=negated ^ (offset % 2 == 1))
