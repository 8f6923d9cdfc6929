"""Find weights of which each rank has drawn its own part: their values depend on the number of ranks.

Where a whole weight is drawn and then cut, each rank has its part of the same weight, on any number of ranks. Where it
is cut first (`fully_shard` on the meta device and then `init_weights()`, Megatron-LM's layers), each draws numbers of
its own. So do ranks that draw whole weights from different seeds, unless somebody sends them those of one rank.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from ..capture.op_call import Traits
from ..compat.torch_names import StorageWeakRef, default_store, local_tensor_or
from ..program.source import Source, here
from .memories import Memories, address, has_memory

# How long a rank waits for the next one to leave its block, in seconds.
_PATIENCE = 60


class RankDrawnWeight(NamedTuple):
    """A parameter or a buffer whose values depend on the number of ranks, since each has drawn its own.

    Attributes:
        name: its name in the outermost module that holds it.
        kind: "parameter", "buffer" or "non-persistent buffer".
        owner: the class of the module that holds it, and the line of that class.
        shape: the shape of this rank's part.
        drawn: the line that has drawn it.
        why: how it is sharded, or from which rank's it differs.
    """

    name: str
    kind: str
    owner: str
    shape: tuple[int, ...]
    drawn: Source
    why: str

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape)) or "a number"
        return f"{self.name}: ({self.kind}, {size} on this rank, of {self.owner}) drawn at {self.drawn}, {self.why}"


class _Drawn(NamedTuple):
    storage: StorageWeakRef
    bytes: int  # that were drawn together
    line: Source


class Draws:
    """Which memory holds numbers that were drawn for it, rather than for a larger tensor that was cut."""

    def __init__(self) -> None:
        self._memory: Memories[_Drawn] = Memories()

    def __bool__(self) -> bool:
        return bool(self._memory)

    def follow(
        self,
        traits: Traits,
        fills: bool,
        read: list[torch.Tensor],
        written: list[torch.Tensor],
        results: list[torch.Tensor],
    ) -> None:
        """Follow an operation that has run.

        Args:
            traits: those of the operation.
            fills: whether it has overwritten what it has written.
            read: the tensors that it has read.
            written: those that it has written.
            results: new ones.
        """
        if traits.random is not None:
            for tensor in written or results:
                self._draw(tensor, here())
            return
        if not self._memory or traits.view or traits.namespace == "c10d" and not fills:
            return
        copied = [] if traits.namespace == "c10d" else read
        source = next((tensor for tensor in copied if self._whole(tensor) is not None), None)
        drawn = None if source is None else self._whole(source)
        for tensor in written if fills else results:
            if self._whole(tensor) is not None:
                del self._memory[address(tensor)]
            is_activation = not written and tensor.requires_grad
            if source is not None and drawn is not None and tensor.numel() == source.numel() and not is_activation:
                self._draw(tensor, drawn.line)

    def _draw(self, tensor: torch.Tensor, line: Source) -> None:
        if has_memory(tensor):
            self._memory.put(tensor, _Drawn(StorageWeakRef(tensor.untyped_storage()), tensor.nbytes, line))

    def _whole(self, tensor: torch.Tensor) -> _Drawn | None:
        """What is known of a tensor that has all numbers that were drawn together; None if it has a part of them."""
        drawn = self._memory.of(tensor)
        return drawn if drawn is not None and tensor.nbytes >= drawn.bytes else None

    def found(self, weights: Iterable[tuple[str, str, str, torch.Tensor]]) -> list[RankDrawnWeight]:
        """The weights among those of these names, kinds, owners and tensors whose values depend on the number of ranks.

        On several ranks, all have to ask.
        """
        found, whole = [], []
        for name, kind, owner, tensor in weights if self._memory else ():
            local = local_tensor_or(tensor, tensor)
            if (drawn := self._memory.of(local)) is None:
                continue
            weight = RankDrawnWeight(name, kind, owner, tuple(local.shape), drawn.line, "")
            if (how := _sharding(tensor)) is not None:
                found.append(weight._replace(why=f"as {how} of {tuple(tensor.shape)}"))
            else:
                whole.append((weight, local))
        return found + _different(whole)

    def clear(self) -> None:
        self._memory.clear()


def _sharding(tensor: torch.Tensor) -> str | None:
    """How a DTensor is cut over several ranks; None if it is not."""
    placements: Any = getattr(tensor, "placements", ())
    cut = [
        str(placement)
        for dim, placement in enumerate(placements)
        if not placement.is_replicate() and getattr(tensor, "device_mesh").size(dim) > 1  # noqa: B009
    ]
    return ", ".join(cut) or None


_checks = itertools.count()


def _different(weights: list[tuple[RankDrawnWeight, torch.Tensor]]) -> list[RankDrawnWeight]:
    """Those that are others on the next rank."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return []
    if distributed.get_backend() == "fake":  # there is no other rank
        return []
    rank, number = distributed.get_rank(), next(_checks)
    following = (rank + 1) % distributed.get_world_size()
    store = default_store()
    keys = [f"firstloss/check_init/{number}/{other}" for other in (rank, following)]
    store.set(keys[0], "\n".join(_described(weight, tensor) for weight, tensor in weights))
    if not weights:
        return []
    try:
        store.wait([keys[1]], datetime.timedelta(seconds=_PATIENCE))
        theirs = dict(line.rsplit("=", 1) for line in store.get(keys[1]).decode().splitlines())
    except RuntimeError:  # it checks nothing, or has ended
        return []
    found = []
    for weight, tensor in weights:
        key, ours = _described(weight, tensor).rsplit("=", 1)
        if theirs.get(key, ours) != ours:
            found.append(weight._replace(why=f"and differs from rank {following}'s"))
    return found


def _described(weight: RankDrawnWeight, tensor: torch.Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{weight.name} {weight.shape}={hashlib.sha256(content).hexdigest()}"
