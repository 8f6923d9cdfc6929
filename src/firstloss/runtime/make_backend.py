"""`firstloss.backend`: creation of backends."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import cache_folder, malloc_settings, timeline
from ..dependencies import require_jax
from ..errors import BackendError, UnusedAcceleratorWarning
from ..interpreter import paused
from ..program.source import warn
from . import lazy_jax
from .backend import EAGER, Backend, current_backend, make_current
from .device import on_gpu

if TYPE_CHECKING:
    from .cluster_config import ClusterConfig

_XLA_NAMES = ("XLA", "CSX")


class _Default(str):
    """A default value, told from the same value that is passed."""


_ARTIFACTS = _Default("./artifacts")


def backend(
    name: str | Backend | None = None,
    *,
    mesh: Any = None,
    same_run: int | None = None,
    cluster_config: ClusterConfig | None = None,
    artifact_dir: str | os.PathLike[str] | None = _ARTIFACTS,
    compile_dir: str | os.PathLike[str] | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    first_loss: str | None = None,
) -> Backend:
    """Create a backend and make it the current one; without arguments, return the current one.

    Examples:
        >>> backend = fl.backend("XLA", artifact_dir="artifacts")
        >>> fl.backend() is backend
        True
        >>> with backend.device:
        ...     model = nn.Linear(8, 4)
        >>> fl.is_deferred(model)
        True

    Args:
        name: "XLA" (or "CSX"), compiled ahead of time for JAX's default device; "CPU", eager PyTorch; "GPU", PyTorch's
            own kernels, with traced steps replayed as CUDA graphs. A Backend object becomes the current one again.
        mesh: the devices that share work and weights: a `jax.sharding.Mesh`, or sizes of axes by name, such as
            `{"fsdp": 4, "tp": 2}`, over JAX's devices in order. The batch is sharded over axes named data, dp, fsdp or
            the like (`docs/meshes.md`). None: one device. A `jax.sharding.AbstractMesh` has no devices: use
            it with `validate_only`, to plan steps (`step.plan(batch)`).
        same_run: compute each step by so many logical shards of its batch, 8 for example, whatever the mesh, so that
            losses and weights are the same, bit for bit, on any mesh whose devices divide them (`docs/meshes.md`).
            None: as XLA divides it; meshes differ in last digits.
        cluster_config: the same as `mesh={"data": cluster_config.num_csx}`, plus the number of loader workers.
        artifact_dir: a folder for files that are reused between runs, and for those of a `DataExecutor`.
        compile_dir: where compiled executables are cached; by default "compiled" in `artifact_dir`, or, if none is
            passed, in the platform's folder for caches (`docs/runtime.md`).
        compile_only: trace, compile and cache steps in `compile_dir` without executing them: no weights are made, a
            `DataExecutor` yields one batch, of which only the shapes are used, and closures do not run. A step's
            results have no values. A later run with the same `compile_dir` need not compile.
        validate_only: the same, but steps are only traced and lowered, not compiled.
        first_loss: "eager" (the default): if a step's weights are new, its first results are computed by PyTorch's own
            kernels as soon as the weights are available, bit-identical to eager PyTorch, while the step compiles in the
            background. "compiled": the compiled step computes them, too. Training is the same either way.

    Returns:
        The backend, which is now the current one.

    Raises:
        BackendError: for an unknown name, or devices that this machine does not have.
        MissingDependencyError: for "XLA" if JAX is not installed.
        ShardingError: if `mesh` is not a mesh.
    """
    only = {
        "compile_dir": compile_dir,
        "compile_only": compile_only,
        "validate_only": validate_only,
        "first_loss": first_loss,
    }
    if first_loss not in (None, "eager", "compiled"):
        raise BackendError(f"first_loss={first_loss!r}: write 'eager' or 'compiled'.")
    if same_run is not None and (type(same_run) is not int or same_run < 1 or same_run & (same_run - 1)):
        raise BackendError(f"same_run={same_run!r}: write the number of logical shards, a power of two, such as 8.")
    given = {"mesh": mesh, "same_run": same_run, "cluster_config": cluster_config, "artifact_dir": artifact_dir, **only}
    dropped = [word for word, value in given.items() if value not in (None, False) and type(value) is not _Default]
    artifact_dir = _ARTIFACTS if artifact_dir is None else artifact_dir
    for word in ("compile_only", "validate_only"):
        if not isinstance(only[word], bool):
            raise BackendError(f"{word}={only[word]!r}: write True or False.")
    if compile_only and validate_only:
        raise BackendError("compile_only and validate_only are both set. compile_only includes validation: use that.")
    if (name is None or isinstance(name, Backend)) and dropped:
        raise BackendError(
            f"{dropped[0]}={given[dropped[0]]!r} cannot be set on a backend that already exists. "
            f'Create another: firstloss.backend("XLA", {dropped[0]}=...).'
        )
    if name is None:
        return current_backend()
    if isinstance(name, Backend):
        return make_current(name)
    if not isinstance(name, str):
        raise BackendError(f'a backend\'s name is "XLA", "CPU" or "GPU", not an object of type {type(name).__name__}.')
    if cluster_config is not None and not hasattr(cluster_config, "num_csx"):
        raise BackendError(
            "cluster_config must be a firstloss.distributed.ClusterConfig(num_csx=...), not an object of type "
            f"{type(cluster_config).__name__}."
        )
    if mesh is not None and cluster_config is not None:
        raise BackendError("mesh and cluster_config both set the devices. Pass one of them.")
    kind = name.upper()
    if kind in _XLA_NAMES:
        malloc_settings.map_arrays()
        if mesh is None and cluster_config is not None and cluster_config.num_csx > 1:
            mesh = {"data": cluster_config.num_csx}
        if mesh is None and same_run is not None:
            mesh = {"data": 1}
        # Import everything that the first step needs, so that it need not wait; JAX is deferred until the first loss
        # has been returned, if that does not need it. Garbage collection is paused: going through the modules of
        # PyTorch and transformers would take as long as the import.
        on_gpu.disable_preallocation()
        with timeline.span("import"), paused():
            if first_loss == "compiled" or compile_only or validate_only or not lazy_jax.can_defer_import(mesh):
                require_jax(f"firstloss.backend({name!r})")
                from . import jax_support  # noqa: F401
                from .step import segmented  # noqa: F401
            from . import compiled_model  # noqa: F401
            from .step import cache, compiled_step, compiling, lowering_markers, trace  # noqa: F401

        devices = None
        if mesh is not None:
            from .mesh.mesh import Mesh

            devices = Mesh(mesh, put_off=not lazy_jax.is_imported(), same_run=same_run)
        if devices is not None and not (devices.is_there or validate_only):
            raise BackendError(
                "an AbstractMesh has no devices to run on. Pass validate_only=True to plan steps for it, or the sizes "
                f"of its axes, as mesh={devices.axes}."
            )
        asked = type(artifact_dir) is not _Default
        caches = Path(artifact_dir).absolute() if asked else cache_folder.default()
        folder = caches / "compiled" if compile_dir is None else Path(compile_dir).absolute()
        if not cache_folder.prepare(folder) and compile_only:
            raise BackendError(
                f"compile_only=True leaves executables in {folder}, which cannot be used. Pass compile_dir."
            )
        lowered = (folder.parent if compile_dir is not None and not asked else caches) / "lowered"
        if not asked and compile_dir is None:
            cache_folder.bound(caches)
        new_backend = Backend(
            "XLA",
            str(artifact_dir),
            devices,
            cluster_config=cluster_config,
            compile_dir=str(folder),
            compile_only=compile_only,
            validate_only=validate_only,
            first_loss=first_loss or "eager",
        )
        if (unused := lazy_jax.unused_accelerator()) and not validate_only:
            warn(UnusedAcceleratorWarning(unused))
        lazy_jax.set_compilation_cache(str(folder) if cache_folder.prepare(folder) else None)
        lowering_markers.set_folder(lowered if cache_folder.prepare(lowered) else None)
    elif kind in EAGER and same_run is not None:
        raise BackendError(
            f'backend {name!r} computes steps as they are written, so same_run has no effect. Use "XLA".'
        )
    elif kind in EAGER and (mesh is not None or cluster_config is not None and cluster_config.num_csx > 1):
        raise BackendError(f'backend {name!r} runs on one device. For a mesh use "XLA".')
    elif kind in EAGER:
        useless = [word for word, value in only.items() if value not in (None, False)]
        if useless:
            raise BackendError(f'backend {name!r} compiles nothing, so {useless[0]} has no effect. Use "XLA".')
        if kind == "GPU" and not torch.cuda.is_available():
            raise BackendError('backend "GPU" needs CUDA, which is not available to this torch. Use "XLA" or "CPU".')
        new_backend = Backend(kind, str(artifact_dir), cluster_config=cluster_config)
    else:
        raise BackendError(f'{name!r} is not a backend. Use "XLA" (also called "CSX"), "CPU" or "GPU".')
    return make_current(new_backend)
