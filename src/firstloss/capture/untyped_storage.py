"""`torch.UntypedStorage` while a constructor is captured: storages are real, and operations on them run at once.

PyTorch copies and fills a storage through tensors that it makes for it, which an open capture would record instead:
the memory would stay as it was found. DLPack takes a tensor's address, and a deferred one has none to give.
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
    """A method of storages that writes memory, or moves it, by tensors."""
    if not session.depth and session.trace is None:
        return original(self, *args, **kwargs)
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    session.constants.clear()  # no tensor's count of edits tells of this one
    with DisableTorchDispatch():
        return original(self, *args, **kwargs)


@replaces("torch.UntypedStorage.resize_")
def resize(original: Any, self: Any, *args: Any) -> Any:
    """As `torch.UntypedStorage.resize_`, which tells no tensor."""
    if session.trace is not None:
        session.trace.new_layouts.edit(self)
    return original(self, *args)


@replaces("torch.UntypedStorage.__getitem__")
def read(original: Any, self: Any, *args: Any) -> Any:
    """A byte, or a part: PyTorch makes a tensor to read it. So safetensors reads its files."""
    with DisableTorchDispatch():
        return original(self, *args)


@replaces("torch.utils.dlpack.to_dlpack")
def to_dlpack(original: Any, tensor: Any) -> Any:
    """As `torch.utils.dlpack.to_dlpack`, on the materialized tensor."""
    return original(to_real(tensor, writable=True) if type(tensor) is DeferredTensor else tensor)


@replaces("torch.Tensor.__deepcopy__")
def deepcopy(original: Any, self: Any, memo: Any) -> Any:
    """As `torch.Tensor.__deepcopy__`, which copies the storage, and shows it to an empty tensor like this one."""
    if not session.depth or type(self) is not torch.Tensor or self.__dict__:
        return original(self, memo)
    with DisableTorchDispatch():
        return original(self, memo)
