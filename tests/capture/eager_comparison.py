"""Shared assertions: deferred construction gives the result of eager construction."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import firstloss as fl


def tensors_of(result: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor in a constructor's result, under each name by which it is reachable; each module once."""
    seen = set() if seen is None else seen
    if isinstance(result, torch.Tensor):
        yield path, result
        return
    if id(result) in seen:
        return
    if isinstance(result, torch.nn.Module):
        seen.add(id(result))
        for name, value in vars(result).items():
            if name in ("_parameters", "_buffers", "_modules") or not name.startswith("_"):
                yield from tensors_of(value, f"{path}.{name}".strip("."), seen)
    elif isinstance(result, dict):
        for key, value in result.items():
            yield from tensors_of(value, f"{path}.{key}".strip("."), seen)
    elif isinstance(result, (list, tuple)):
        for number, value in enumerate(result):
            yield from tensors_of(value, f"{path}.{number}".strip("."), seen)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements in logical order, as bytes: includes NaN payloads and the sign of zero."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def eager(fn: Callable[[], Any], seed: int = 0) -> tuple[Any, bytes]:
    """The result of `fn` in eager PyTorch, and the state of the global generator afterwards."""
    seed_all(seed)
    with quiet():
        result = fn()
    return result, torch.get_rng_state().numpy().tobytes()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def deferred(fn: Callable[[], Any], seed: int = 0) -> tuple[Any, bytes]:
    """The deferred result of `fn`, and the state of the global generator afterwards."""
    seed_all(seed)
    with quiet():
        result = fl.deferred_init(fn)
    return result, torch.get_rng_state().numpy().tobytes()


def materialize(result: Any, **options: Any) -> None:
    """Materialize everything deferred in a constructor's result."""
    if isinstance(result, torch.nn.Module):
        fl.materialize_module(result, **options)
    else:
        for _, tensor in tensors_of(result):
            fl.materialize_tensor(tensor)


def steps(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element; the others are arbitrary."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in sizes if size > 1] if tensor.numel() else []


def assert_same(expected: Any, actual: Any) -> None:
    """Both have the same tensors under the same names: properties, ties and bytes."""
    want, have = list(tensors_of(expected)), list(tensors_of(actual))
    assert [name for name, _ in want] == [name for name, _ in have]
    for (name, a), (_, b) in zip(want, have, strict=True):
        assert not fl.is_deferred(b), f"{name} is still deferred"
        assert type(b) is type(a), (name, type(a), type(b))
        if isinstance(a, torch.nn.parameter.UninitializedTensorMixin):
            continue
        for what in ("dtype", "shape", "device", "requires_grad", "is_leaf", "layout"):
            assert getattr(b, what) == getattr(a, what), (name, what, getattr(a, what), getattr(b, what))
        assert steps(b) == steps(a), (name, "stride", a.stride(), b.stride())
        assert b.storage_offset() == a.storage_offset(), (name, "offset", a.storage_offset(), b.storage_offset())
        if a.is_meta:
            continue
        assert bytes_of(b) == bytes_of(a), f"{name}: values differ\n{a}\n{b}"
    assert _groups(want, id) == _groups(have, id), "ties differ"
    assert _groups(want, _storage) == _groups(have, _storage), "shared memory differs"


def _storage(tensor: torch.Tensor) -> Any:
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) or tensor.numel() == 0:
        return id(tensor)
    return tensor.untyped_storage()._cdata


def _groups(named: list[tuple[str, torch.Tensor]], key: Callable[[torch.Tensor], Any]) -> list[int]:
    first: dict[Any, int] = {}
    return [first.setdefault(key(tensor), len(first)) for _, tensor in named]


def assert_same_as_eager(fn: Callable[[], Any], seed: int = 0, ways: Any = ({},), anything: bool = True) -> Any:
    """Assert that `fn`, deferred and materialized, gives the eager result from the same seed; returns the last result.

    Args:
        ways: options of `materialize_module`; the comparison is made with each.
        anything: something has to be deferred when capture ends.
    """
    expected, expected_state = eager(fn, seed)
    for options in ways:
        result, state = deferred(fn, seed)
        assert state == expected_state, "the generator does not stand where eager leaves it"
        if anything:
            assert any(fl.is_deferred(tensor) for _, tensor in tensors_of(result)), "nothing was deferred"
        with quiet():
            materialize(result, **options)
        assert torch.get_rng_state().numpy().tobytes() == expected_state, "materializing moved the generator"
        assert_same(expected, result)
    return result
