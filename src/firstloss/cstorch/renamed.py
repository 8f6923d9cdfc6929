"""Functions of `firstloss` whose arguments have other names, or another order, in `cerebras.pytorch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

import firstloss as fl

from ..runtime.backend import Backend
from .accepted import say

# Arguments of earlier releases' backends, which chose how Cerebras' cluster works.
_OF_THE_CLUSTER = ("drop_data", "log_initialization", "max_checkpoints", "use_cs_grad_accum")


def backend(
    backend_type: Any = None,
    artifact_dir: str | os.PathLike[str] | None = None,
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    cluster_config: fl.distributed.ClusterConfig | None = None,
    **options: Any,
) -> Backend:
    """As `firstloss.backend`.

    Args:
        backend_type: "CSX", "CPU" or "GPU"; a backend; or nothing, for the current one.
        artifact_dir, compile_dir, compile_only, validate_only, cluster_config: as of `firstloss.backend`.
        options: others of `firstloss.backend`, such as `mesh`. Those of earlier releases that are for Cerebras' cluster
            alone (`use_cs_grad_accum`, `max_checkpoints`, `log_initialization`, `drop_data`) have no effect.

    Returns:
        The backend, which is now the current one.
    """
    for name in [name for name in _OF_THE_CLUSTER if name in options]:
        del options[name]
        say(f"backend(..., {name}=)")
    given: dict[str, Any] = {
        "artifact_dir": artifact_dir,
        "compile_dir": compile_dir,
        "compile_only": compile_only,
        "validate_only": validate_only,
        "cluster_config": cluster_config,
    }
    return fl.backend(backend_type, **{k: v for k, v in given.items() if v not in (None, False)}, **options)


def device(backend_type: str, *args: Any, **kwargs: Any) -> Any:
    """The device of a new backend.

    Args:
        backend_type, args, kwargs: as of `backend`.

    Returns:
        `backend(backend_type, ...).device`.
    """
    return backend(backend_type, *args, **kwargs).device


def current_backend(raise_exception: bool = True, raise_warning: bool = True) -> Backend | None:
    """As `firstloss.current_backend`.

    Args:
        raise_exception: if False, return None rather than raise.
        raise_warning: for a warning that there is not.

    Returns:
        The backend; None if there is none yet and `raise_exception` is False.
    """
    return fl.current_backend(raise_exception=raise_exception)


def save(state_dict: Any, ckpt_path: str | os.PathLike[str]) -> None:
    """As `firstloss.save`.

    Args:
        state_dict: what to save: tensors, numbers and texts in dicts, lists and tuples.
        ckpt_path: where to.
    """
    fl.save(state_dict, ckpt_path)


def load(
    ckpt_path: str | os.PathLike[str],
    map_location: str | torch.device | Mapping[str, str] | Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """As `firstloss.load`.

    Args:
        ckpt_path: written by `save`, or whatever else `firstloss.load` reads.
        map_location: a device, its name, or what `torch.load` takes: a table of devices, or a function of a tensor's
            storage and its device. Tensors are saved as the CPU's here, so that both are asked for "cpu".
        kwargs: of `torch.load`, such as `mmap` and `weights_only`: tensors are read when used, and no code is run,
            whatever they say.

    Returns:
        What was saved.
    """
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    elif callable(map_location):
        placed = map_location(torch.UntypedStorage(0), "cpu")
        map_location = None if placed is None else placed.device
    return fl.load(ckpt_path, map_location)
