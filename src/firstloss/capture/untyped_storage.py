"""Patches of `torch.UntypedStorage`, whose operations run immediately during capture.

PyTorch copies and fills a storage through temporary tensors, whose operations an open capture would record without
changing the memory. DLPack needs a tensor's address, so it materializes.
"""

from __future__ import annotations

from typing import Any

import torch

from ..compat.patches import replaces
from ..compat.torch_names import DisableTorchDispatch
from . import session
from .tensor import DeferredTensor, to_real


@replaces(
    *(f"torch.UntypedStorage.{name}" for name in ("copy_", "fill_", "__setitem__")),
    *(f"torch.UntypedStorage.{name}" for name in ("_share_fd_cpu_", "_share_filename_cpu_")),
)
def at_once(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """As `original`, a method that writes or moves a storage."""
    if not session.depth and session.trace is None:
        return original(self, *args, **kwargs)
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    session.constants.clear()  # no tensor's version counts this edit
    with DisableTorchDispatch():
        return original(self, *args, **kwargs)


@replaces("torch.UntypedStorage.resize_")
def resize(original: Any, self: Any, *args: Any) -> Any:
    """As `torch.UntypedStorage.resize_`."""
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    return original(self, *args)


@replaces("torch.UntypedStorage.__getitem__")
def read(original: Any, self: Any, *args: Any) -> Any:
    """As `torch.UntypedStorage.__getitem__`, which creates a tensor; safetensors uses it to read files."""
    with DisableTorchDispatch():
        return original(self, *args)


@replaces("torch.utils.dlpack.to_dlpack")
def to_dlpack(original: Any, tensor: Any) -> Any:
    """As `torch.utils.dlpack.to_dlpack`, on the materialized tensor."""
    return original(to_real(tensor, writable=True) if type(tensor) is DeferredTensor else tensor)


@replaces("torch.Tensor.__deepcopy__")
def deepcopy(original: Any, self: Any, memo: Any) -> Any:
    """As `torch.Tensor.__deepcopy__`, which copies the storage."""
    if not session.depth or type(self) is not torch.Tensor or self.__dict__:
        return original(self, memo)
    with DisableTorchDispatch():
        return original(self, memo)
