"""Memory itself, while a constructor is captured: storages are real, and what is done to them is done at once.

PyTorch copies and fills a storage through tensors that it makes for it, which an open capture would record instead:
the memory would stay as it was found. DLPack takes a tensor's address, and a deferred one has none to give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import dlpack

from ..compat.torch_names import DisableTorchDispatch
from . import session
from .tensor import DeferredTensor, made

# What writes memory, or moves it, by tensors.
_METHODS = ("copy_", "fill_", "__setitem__", "_share_fd_cpu_", "_share_filename_cpu_")

_original_deepcopy = torch.Tensor.__deepcopy__
_original_to_dlpack = dlpack.to_dlpack


def _at_once(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not session.depth and session.trace is None:
            return original(self, *args, **kwargs)
        session.constants.clear()  # no tensor's count of edits tells of this one
        with DisableTorchDispatch():
            return original(self, *args, **kwargs)

    return method


def to_dlpack(tensor: Any) -> Any:
    """As `torch.utils.dlpack.to_dlpack`, on the materialized tensor."""
    return _original_to_dlpack(made(tensor, writable=True) if type(tensor) is DeferredTensor else tensor)


def _deepcopy(self: Any, memo: Any) -> Any:
    """As `torch.Tensor.__deepcopy__`, which copies the storage, and shows it to an empty tensor like this one."""
    if not session.depth or type(self) is not torch.Tensor or self.__dict__:
        return _original_deepcopy(self, memo)
    with DisableTorchDispatch():
        return _original_deepcopy(self, memo)


def install() -> None:
    """Put the replacements in place."""
    for name in _METHODS:
        setattr(torch.UntypedStorage, name, _at_once(getattr(torch.UntypedStorage, name)))
    torch.Tensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign]
    torch.to_dlpack = dlpack.to_dlpack = to_dlpack  # type: ignore[assignment]


install()
