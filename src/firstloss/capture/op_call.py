"""A call of an ATen operation, with its tensors collected from the arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from ..compat.torch_names import OpOverload, schema_of
from ..errors import CaptureError
from ..program.source import here
from .op_schema import Traits
from .tensor import DeferredTensor

Tensor = torch.Tensor

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class OpCall:
    """A call of an ATen operation.

    Attributes:
        deferred, real: its deferred and real tensors, in argument order.
        key: everything that the shape of its result may depend on; hashable if the arguments are.
        on_meta: whether it requests a result on the meta device.
        symbolic: whether an argument is a number that is not known until the step runs.
    """

    __slots__ = ("op", "traits", "args", "kwargs", "deferred", "real", "key", "on_meta", "symbolic")

    def __init__(self, op: OpOverload, traits: Traits, args: tuple, kwargs: dict[str, Any]) -> None:
        self.op = op
        self.traits = traits
        self.args = args
        self.kwargs = kwargs
        self.deferred: list[DeferredTensor] = []
        self.real: list[Tensor] = []
        self.on_meta = False
        self.symbolic = False
        key: list[Any] = [op]
        self._scan(args, key)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                if name == "device" and value is not None and torch.device(value).type == "meta":
                    self.on_meta = True
                self._scan((value,), key)
        self.key = tuple(key)

    def _scan(self, args, key: list) -> None:
        for arg in args:
            kind = type(arg)
            if kind is DeferredTensor:
                self.deferred.append(arg)
                key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype))
            elif kind is list or kind is tuple:
                key.append(len(arg))
                self._scan(arg, key)
            elif isinstance(arg, Tensor):
                self.real.append(arg)
                if isinstance(arg, UninitializedTensorMixin):  # has no shape
                    continue
                if arg.layout in _COMPRESSED:
                    raise CaptureError(
                        f"{here()}: {self.op} is called with a tensor of layout {arg.layout} and a deferred one, which "
                        "is not supported. Pass a dense tensor (`.to_dense()`)."
                    )
                key.append((arg.shape, arg.stride(), arg.storage_offset(), arg.dtype))
            elif kind is torch.SymFloat or kind is torch.SymInt:
                self.symbolic = True
                key.append(kind)
            else:
                key.append(kind)
                key.append(arg)

    def written(self) -> list[Tensor]:
        """The tensors that the call writes to."""
        out: list[Tensor] = []
        for where in self.traits.writes:
            arg = self.argument(where)
            if isinstance(arg, (list, tuple)):
                out.extend(arg)
            elif arg is not None:
                out.append(arg)
        return out

    @property
    def is_foreach(self) -> bool:
        """Whether it is a foreach operation, on lists of tensors."""
        return (
            bool(self.args)
            and type(self.args[0]) in (list, tuple)
            and schema_of(self.op).name.startswith("aten::_foreach_")
        )

    def argument(self, where: int | str) -> Any:
        """The argument at a position or of a keyword; None if it was not given."""
        if isinstance(where, str):
            return self.kwargs.get(where)
        return self.args[where] if where < len(self.args) else None

    def generator_argument(self) -> torch.Generator | None:
        """The `generator` argument of the call."""
        found = self.kwargs.get("generator")
        if found is None and self.traits.generator is not None and self.traits.generator < len(self.args):
            found = self.args[self.traits.generator]
        return found

    def generator(self) -> torch.Generator:
        """The generator that the call draws from; the default one of the CPU if none is given."""
        found = self.generator_argument()
        return torch.default_generator if found is None else found

    def device(self) -> torch.device:
        """The device of the result."""
        device = self.kwargs.get("device")
        if device is not None:
            return torch.device(device)
        best = None
        for t in (*self.deferred, *self.real):
            if best is None or (t.dim() > 0 and best.dim() == 0):
                best = t
        return best.device if best is not None else torch.device("cpu")

    def plain_arguments(self) -> dict[str, Any]:
        """The numeric arguments by name, and the dtypes of tensor arguments: the `op_args` of `words_drawn.draw`."""
        out: dict[str, Any] = {}
        for spec, arg in zip(schema_of(self.op).arguments, self.args, strict=False):
            out[spec.name] = arg
        out.update(self.kwargs)
        out.pop("generator", None)
        plain: dict[str, Any] = {}
        for name, arg in out.items():
            if isinstance(arg, Tensor):
                plain[f"{name}_dtype"] = str(arg.dtype).removeprefix("torch.")
            elif isinstance(arg, (int, float, bool)):
                plain["from_" if name == "from" else name] = arg
        return plain

    def returns_one(self) -> bool:
        """Whether it returns one tensor, rather than a list or tuple of them."""
        returns = schema_of(self.op).returns
        return len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
