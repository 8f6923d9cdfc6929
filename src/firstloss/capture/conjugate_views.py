"""Conjugated and negated views, as views of a second storage that mirrors the first.

In PyTorch `x.conj()` of a complex tensor is a view with a conjugate bit: readers conjugate lazily. A geometry has no
such bit, so the view has the geometry of `x` in a *mirror* of its storage, whose content is conjugated. It is still a
view: a write to the storage recomputes its mirrors, and a write to a mirror is conjugated and written to the storage.
When the tensors become real, the view is created from the real tensor, with PyTorch's bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.ops import aten

from ..compat.torch_names import DisableTorchDispatch, OpOverload, base_of, neg_view
from ..errors import CaptureError
from ..program.graph import dense_count, geometry_of, span
from ..program.source import here
from . import session
from .conjugate_bits import lazy_bits
from .op_call import outer_geometry, storage_of
from .tensor import DeferredStorage, DeferredTensor, Hooks, Mirror, on_backend, to_real


def view_lazily(op: OpOverload, computed_by: OpOverload, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> Any:
    """Handle a lazy view such as `x.conj()`, whose content `computed_by` computes."""
    source = args[0]
    if not isinstance(source, torch.Tensor):  # a number that a formula of PyTorch's has wrapped: in `x * 2j`'s backward
        source = Hooks.dispatch(aten.scalar_tensor.default, (source,), {"dtype": torch.complex128})
    if session.trace is None and (type(source) is not DeferredTensor or on_backend(source)):
        real = to_real(source, writable=True) if type(source) is DeferredTensor else source
        with DisableTorchDispatch():
            return op(real, **kwargs)
    storage = storage_of(source)
    size, stride, offset, dtype = geometry_of(source) if type(source) is DeferredTensor else outer_geometry(source)
    return DeferredTensor.wrap(_mirror(storage, computed_by, dtype), size, stride, offset, dtype)


def mirror_of(tensor: torch.Tensor) -> DeferredStorage:
    """The storage, in a step, of a real conjugated or negated view from outside."""
    with DisableTorchDispatch(), torch.no_grad():
        if tensor.is_neg():
            mirror = _mirror(storage_of(neg_view(tensor)), aten.neg.default, tensor.dtype)
        else:
            mirror = _mirror(storage_of(tensor.conj()), aten._conj_physical.default, tensor.dtype)
    if session.trace is not None and not mirror.alive():
        session.trace.mirrors.append(_whole(mirror, tensor.dtype))
    return mirror


def _mirror(storage: DeferredStorage, computed_by: OpOverload, dtype: torch.dtype) -> DeferredStorage:
    if storage.mirrors is not None and (storage.mirrors.computed_by, storage.mirrors.dtype) == (computed_by, dtype):
        return storage.mirrors.of
    shows = Mirror(computed_by, storage, dtype)
    mirror = next((m for m in mirrors_of(storage) if m.mirrors == shows), None)
    if mirror is None:
        value = storage.value
        if value.numel and dense_count(value.shape, value.stride) != value.numel:
            raise CaptureError(
                f"{here()}: a conjugated or negated view of non-dense memory is not supported. Conjugate a copy: "
                "tensor.contiguous().conj()."
            )
        mirror = DeferredStorage(_content(shows))
        mirror.trace = session.trace
        mirror.mirrors = shows
        storage.mirrored_by.append(weakref.ref(mirror))
    return mirror


def _whole(storage: DeferredStorage, dtype: torch.dtype) -> DeferredTensor:
    """A whole storage as a vector."""
    count = storage.value.numel * storage.value.dtype.itemsize // dtype.itemsize
    return DeferredTensor.wrap(storage, (count,), (1,), 0, dtype)


def _content(mirror: Mirror) -> Any:
    return Hooks.dispatch(mirror.computed_by, (_whole(mirror.of, mirror.dtype),), {})._storage.value


def written(storage: DeferredStorage) -> None:
    """Update the storage that `storage` mirrors, and its mirrors, after a write to it."""
    if storage.mirrors is not None:
        computed_by, of, dtype = storage.mirrors
        content = Hooks.dispatch(computed_by, (_whole(storage, dtype),), {})
        Hooks.dispatch(aten.copy_.default, (_whole(of, dtype), content), {})  # which recomputes its mirrors
        return
    _make_mirrors(storage)


def _make_mirrors(storage: DeferredStorage) -> None:
    for mirror in mirrors_of(storage):
        assert mirror.mirrors is not None
        mirror.value = _content(mirror.mirrors)
        _make_mirrors(mirror)


def mirrors_of(storage: DeferredStorage) -> list[DeferredStorage]:
    """The mirrors of `storage` that have views."""
    mirrors = [m for ref in storage.mirrored_by if (m := ref()) is not None and (m.alive() or mirrors_of(m))]
    storage.mirrored_by = [weakref.ref(m) for m in mirrors]
    return [m for m in mirrors if m.trace is None or m.trace is session.trace]  # not of a step that has ended


def move(storage: DeferredStorage, to: DeferredStorage) -> None:
    """Let the mirrors of `storage` mirror `to`, a larger storage that begins with the same content."""
    for mirror in mirrors_of(storage):
        assert mirror.mirrors is not None
        mirror.mirrors = mirror.mirrors._replace(of=to)
        to.mirrored_by.append(weakref.ref(mirror))
    storage.mirrored_by = []
    _make_mirrors(to)


def with_mirrors(storages: list[DeferredStorage]) -> list[DeferredStorage]:
    """`storages`, the storages that they mirror, and all mirrors of these: they become real together."""
    family: dict[int, DeferredStorage] = {}
    stack = storages[::-1]
    while stack:
        storage = stack.pop()
        if id(storage) not in family:
            family[id(storage)] = storage
            stack += mirrors_of(storage) if storage.mirrors is None else [storage.mirrors.of, *mirrors_of(storage)]
    return list(family.values())


def bases(mirror: DeferredStorage) -> list[tuple[DeferredTensor, torch.Tensor]]:
    """The views of `mirror`, each with its base: a tensor of the mirrored storage.

    The base is autograd's, if it knows one; else a new tensor of the whole storage.
    """
    root = mirror.root
    views = ((tensor, base_of(tensor)) for tensor in mirror.alive())
    return [
        (tensor, base if type(base) is DeferredTensor and base._storage is root else _whole(root, root.value.dtype))
        for tensor, base in views
    ]


def view_of(tensor: DeferredTensor, base: torch.Tensor) -> torch.Tensor:
    """The view `tensor` as a view of `base`, which has become real.

    Created from its geometry instead of by replaying view operations, because `base` may have been reshaped in place.
    """
    size, stride, offset, dtype = geometry_of(tensor)
    return bits_of(tensor)(vector_of(base, dtype).as_strided(size, stride, offset))


def unmirrored(tensor: DeferredTensor) -> DeferredTensor:
    """The tensor with the geometry of `tensor` in the mirrored storage; `tensor` itself if it is not in a mirror."""
    root = tensor._storage.root
    return tensor if root is tensor._storage else DeferredTensor.wrap(root, *geometry_of(tensor))


def bits_of(tensor: DeferredTensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that applies the lazy bits of `tensor` to `unmirrored(tensor)`."""
    conjugated, negated, alternating = lazy_bits(tensor)
    if alternating:
        size, stride, offset, _ = geometry_of(tensor)
        odd = torch.arange(offset + span(size, stride)).as_strided(size, stride, offset) % 2
        return lambda unmirrored_tensor: unmirrored_tensor * (1 - 2 * (odd ^ negated)).to(unmirrored_tensor)
    if conjugated:
        return (lambda unmirrored_tensor: neg_view(unmirrored_tensor.conj())) if negated else torch.conj
    return neg_view if negated else lambda unmirrored_tensor: unmirrored_tensor


def vector_of(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The whole storage of `base` as a vector of `dtype`."""
    count = base.untyped_storage().nbytes() // base.itemsize
    flat = base.as_strided((count,), (1,), 0)
    if dtype == base.dtype:
        return flat
    if base.dtype.is_complex and base.dtype.to_real() == dtype:
        return torch.view_as_real(flat).view(-1)
    if dtype.is_complex and dtype.to_real() == base.dtype:
        return torch.view_as_complex(flat[: count // 2 * 2].view(-1, 2))
    return flat.view(dtype)
