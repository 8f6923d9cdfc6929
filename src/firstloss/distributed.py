"""How many devices a run takes, and tensors that several processes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .errors import BackendError
from .settings import Settings


@dataclass
class ClusterConfig(Settings):
    """The devices of a run.

    Attributes:
        num_csx: devices that share each batch between them (data parallel); each holds `1/num_csx` of it.
        num_workers_per_csx: None. The loader itself says how many processes read data, and anything else is an error.

    Raises:
        BackendError: if `num_csx` is less than 1, or `num_workers_per_csx` is given.
    """

    num_csx: int = 1
    num_workers_per_csx: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_csx, int) or isinstance(self.num_csx, bool) or self.num_csx < 1:
            raise BackendError(f"num_csx={self.num_csx!r}: a run takes at least one device.")
        workers = self.num_workers_per_csx
        if workers is not None:
            raise BackendError(
                f"num_workers_per_csx={workers!r}: there are no machines here that only read data. Leave it out, and "
                f"let your loader say how many processes read: torch.utils.data.DataLoader(..., num_workers={workers})."
            )


def global_batch(batch: Any) -> Any:
    """One batch for all processes, made of what each has read.

    A traced step computes on the batch of all devices. Where several processes train together, each may read its own
    rows: this puts them one behind the other, in the order of the mesh, without sending them anywhere. All processes
    have to call it, with as many rows each.

    Args:
        batch: tensors of this process, in lists, tuples and dicts; their first dimension is rows.

    Returns:
        `batch` with tensors of the backend, which have the rows of all processes.

    Raises:
        BackendError: if the current backend has no mesh.
    """
    from .runtime.backend import current_backend

    backend = current_backend()
    if backend.mesh is None:
        raise BackendError("a global batch is one for a mesh. Make the backend with mesh= or cluster_config=.")
    from .runtime.executable import resident
    from .runtime.mesh import put_parts

    mesh = backend.mesh
    return pytree.tree_map_only(torch.Tensor, lambda tensor: resident(put_parts(tensor, mesh)), batch)


def gather(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a weight, parts of which lie in other processes. All processes have to call it.

    Any other tensor is copied.
    """
    from .capture.tensor import DeferredTensor

    if type(tensor) is not DeferredTensor or tensor._store.resident is None:
        return tensor.detach().clone()

    return tensor._ref().view(tensor._store.resident.gathered()).clone()
