"""`ClusterConfig(num_workers_per_csx=)`: the backend says how many workers a loader has."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import LoaderError
from ...runtime.backend import current_backend
from ...runtime.mesh.processes import processes


def with_workers(loader: Any, name: str) -> Any:
    """`loader`, with as many workers as the current backend wants, if it says so.

    Args:
        name: of the loader, for errors.

    Raises:
        LoaderError: for a loader that can have none.
    """
    count = num_workers_setting()
    if count is None:
        return loader
    if not isinstance(loader, torch.utils.data.DataLoader):
        if count == 0:
            return loader
        raise LoaderError(
            f"{name} is no torch.utils.data.DataLoader, which alone has workers, and the backend's ClusterConfig asks "
            f"for num_workers_per_csx. Leave that out, or return DataLoader(dataset, ...)."
        )
    if loader.num_workers != count:
        loader.num_workers = count
        # As DataLoader(num_workers=count) has it by default.
        if count and loader.prefetch_factor is None:
            loader.prefetch_factor = 2
        if not count:
            loader.prefetch_factor = None
            object.__setattr__(loader, "persistent_workers", False)
    return loader


def num_workers_setting() -> int | None:
    """Workers of this process, by the current backend; None if it leaves that to loaders."""
    backend = current_backend(raise_exception=False)
    config = None if backend is None else backend.cluster_config
    if config is None or config.num_workers_per_csx is None:
        return None
    return -(-config.num_workers_per_csx * config.num_csx // processes(backend).count)
