"""`firstloss.distributed.ClusterConfig`: the number of data-parallel devices and of loader workers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..errors import BackendError
from ..no_effect import say_no_effect
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

        mgmt_address: this and the rest: of Cerebras' cluster, and without effect.

    Raises:
        BackendError: if `num_csx` is less than 1, or `num_workers_per_csx` less than 0.
    """

    num_csx: int = 1
    num_workers_per_csx: int | None = None
    mgmt_address: Any = None
    mgmt_namespace: Any = None
    credentials_path: Any = None
    max_wgt_servers: Any = None
    max_act_per_csx: Any = None
    cbcore_image: Any = None
    job_labels: Any = None
    job_priority: Any = None
    job_time_sec: Any = None
    mount_dirs: Any = None
    python_paths: Any = None
    automount: Any = None
    mount_all: Any = None
    disable_mount_check: Any = None
    disable_version_check: Any = None
    workflow_id: Any = None
    notifications: Any = None

    def __post_init__(self) -> None:
        for given in fields(self)[2:]:
            if getattr(self, given.name) is not None:
                say_no_effect(f"ClusterConfig's {given.name}")
        if not isinstance(self.num_csx, int) or isinstance(self.num_csx, bool) or self.num_csx < 1:
            raise BackendError(f"num_csx={self.num_csx!r}: a run needs at least one device.")
        workers = self.num_workers_per_csx
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 0):
            raise BackendError(f"num_workers_per_csx={workers!r} is not an integer of at least 0.")
