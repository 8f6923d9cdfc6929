"""A fingerprint of recipes: equal fingerprints mean equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch

from .graph import FileValue, Ref, Value, slice_for
from .nested import mapped


def fingerprint(refs: Iterable[Ref], *extra: object) -> str:
    """A hexadecimal hash of the content of `refs` and of `extra`, on this machine with this version of PyTorch.

    Recipes are hashed without running them: operations, stream positions, and the bytes of constants. What is read
    from a mapped file is told by the file's path, size and time.
    """
    wanted = list(refs)
    digest = hashlib.sha256()
    names: dict[Value, str] = {}
    streams: dict[int, str] = {}

    def update(*parts: object) -> None:
        digest.update(repr(parts).encode())

    def name(value: Value) -> str:
        if value not in names:
            names[value] = f"%{len(names)}"
            update(names[value], value.shape, value.stride, str(value.dtype))
            if isinstance(value, FileValue) and value.origin is not None:
                update(value.origin)
            elif value.real is not None:
                _hash_tensor(digest, value.real)
        return names[value]

    def show(arg: Any) -> object:
        if type(arg) is Ref:
            return name(arg.value), arg.size, arg.stride, arg.offset, str(arg.dtype)
        return str(arg)

    update(torch.__version__, torch.backends.cpu.get_cpu_capability(), *extra)
    for node in slice_for(ref.value for ref in wanted):
        kwargs = sorted((k, mapped(show, v, tuple)) for k, v in node.kwargs.items())
        update(str(node.op), mapped(show, node.args, tuple), kwargs)
        if node.draw is not None:
            stream = node.draw.stream
            if id(stream) not in streams:
                update(type(stream).__name__)
                streams[id(stream)] = hashlib.sha256(stream.state_at(stream.start).tobytes()).hexdigest()
            update(streams[id(stream)], str(node.draw.position))
        update([name(value) for value in node.outputs])
    update([show(ref) for ref in wanted])
    return digest.hexdigest()


def _hash_tensor(digest: Any, tensor: torch.Tensor) -> None:
    flat = tensor.detach().contiguous().reshape(-1)
    step = max((64 << 20) // max(flat.itemsize, 1), 1)
    for begin in range(0, flat.numel(), step):
        digest.update(flat[begin : begin + step].cpu().view(torch.uint8).numpy())
