"""`firstloss.distributed.ClusterConfig`: the number of data-parallel devices and of loader workers."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import BackendError
from ..settings import Settings


@dataclass
class ClusterConfig(Settings):
    """The number of devices of a run, and of processes that read data.

    Examples:
        >>> cluster = fl.distributed.ClusterConfig(num_csx=1)
        >>> fl.backend("XLA", cluster_config=cluster) is fl.backend()
        True

    Attributes:
        num_csx: data-parallel devices; each computes `1/num_csx` of each batch.
        num_workers_per_csx: loader workers for each of these devices. A `DataLoader` iterated by a `DataExecutor` or a
            Trainer then has `num_csx` times as many workers, whatever its own `num_workers`; several processes of a run
            share them. 0: none. None: each loader's own setting.

    Raises:
        BackendError: if `num_csx` is less than 1, or `num_workers_per_csx` less than 0.
    """

    num_csx: int = 1
    num_workers_per_csx: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_csx, int) or isinstance(self.num_csx, bool) or self.num_csx < 1:
            raise BackendError(f"num_csx={self.num_csx!r}: a run needs at least one device.")
        workers = self.num_workers_per_csx
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 0):
            raise BackendError(f"num_workers_per_csx={workers!r} is not an integer of at least 0.")
