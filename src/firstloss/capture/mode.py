"""The dispatch mode under which a constructor, or a step, is captured."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

from . import recorder
from .tensor import has_strangers


class CaptureMode(TorchDispatchMode):
    """Brings factory functions, whose arguments hold no deferred tensor, to the recorder as well."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, and imports its compiler (a second) to do so

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if has_strangers(types):  # a wrapper's own dispatch comes first; what it does to deferred tensors is recorded
            return func(*args, **(kwargs or {}))
        return recorder.dispatch(func, args, kwargs or {})
