"""How many devices a run takes."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import BackendError


@dataclass
class ClusterConfig:
    """The devices of a run.

    Attributes:
        num_csx: devices that share each batch between them (data parallel); each holds `1/num_csx` of it.
        num_workers_per_csx: processes that read data for each device; None leaves it to the loader.

    Raises:
        BackendError: if `num_csx` is less than 1 or `num_workers_per_csx` less than 0.
    """

    num_csx: int = 1
    num_workers_per_csx: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_csx, int) or self.num_csx < 1:
            raise BackendError(f"num_csx={self.num_csx!r}: a run takes at least one device.")
        workers = self.num_workers_per_csx
        if workers is not None and (not isinstance(workers, int) or workers < 0):
            raise BackendError(f"num_workers_per_csx={workers!r}: give a number of processes, or None.")
