"""Backends: where training runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from .. import heap, timeline
from ..amp.precision import set_device_type
from ..capture import session
from ..capture.deferred import deferred
from ..dependencies import require_jax
from ..errors import BackendError
from ..settings import Settings, check_name
from .device.at_once import moved_at_once
from .device.keys import Keys

if TYPE_CHECKING:
    from ..distributed import ClusterConfig
    from .mesh.mesh import Mesh

_XLA_NAMES = ("XLA", "CSX")
_EAGER = {"CPU": "cpu", "GPU": "cuda"}

ARTIFACTS = "./artifacts"

_current: Backend | None = None


@dataclass
class DeviceConfig(Settings):
    """How weights come to the device.

    Attributes:
        lazy_initialization: capture constructors under `with backend.device`, and materialize beside the compile.
            False: constructors run eagerly, and each weight is moved as soon as its module is made, so that host memory
            holds those of one module at a time. On the eager backends they always run eagerly.

    Raises:
        BackendError: if it is neither True nor False.
    """

    lazy_initialization: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lazy_initialization, bool):
            raise BackendError(f"lazy_initialization={self.lazy_initialization!r}: write True or False.")


class Device:
    """A backend's device; as a context manager, weights constructed inside belong to the backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.config = DeviceConfig()
        self._open: list[AbstractContextManager] = []

    def __setattr__(self, name: str, value: Any) -> None:
        check_name(self, name, ("_backend", "config", "_open"))
        if name == "config" and not isinstance(value, DeviceConfig):
            raise BackendError(f"device.config is a DeviceConfig, not an object of type {type(value).__name__}.")
        object.__setattr__(self, name, value)

    def __enter__(self) -> Device:
        if self._backend.is_xla:
            context: AbstractContextManager = (
                deferred() if self.config.lazy_initialization else moved_at_once(self._backend)
            )
        else:
            context = torch.device(self._backend.torch_device)
        context.__enter__()
        self._open.append(context)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().__exit__(*exception)

    def __repr__(self) -> str:
        return f"<device of backend {self._backend.name}>"


class Backend:
    """A place where training runs: make one with `firstloss.backend`."""

    def __init__(
        self,
        name: str,
        artifact_dir: str,
        mesh: Mesh | None = None,
        *,
        cluster_config: ClusterConfig | None = None,
        compile_dir: str | None = None,
        compile_only: bool = False,
        validate_only: bool = False,
        first_loss: str = "eager",
    ) -> None:
        self.name = name
        self.artifact_dir = artifact_dir
        self.compile_dir = compile_dir
        self.cluster_config = cluster_config
        self.compile_only = compile_only
        self.validate_only = validate_only
        self.is_xla = name == "XLA"
        self.torch_device = torch.device(_EAGER.get(name, "cpu"))
        self.device = Device(self)
        self.models: list[torch.nn.Module] = []
        self.keys = Keys()
        self.mesh = mesh
        self.first_loss = first_loss
        self.stepped = False  # whether a step has run on it
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "_made" in self.__dict__:
            check_name(self, name, self.__dict__)
            if name not in ("device", "models", "keys", "stepped"):
                raise BackendError(
                    f"a backend's {name} is decided when it is made: firstloss.backend(..., {name}=...)."
                )
        object.__setattr__(self, name, value)

    @property
    def is_csx(self) -> bool:
        """Whether it compiles ahead of time: "XLA", also called "CSX"."""
        return self.is_xla

    @property
    def is_cpu(self) -> bool:
        """Whether it is eager PyTorch on the CPU."""
        return self.name == "CPU"

    @property
    def is_gpu(self) -> bool:
        """Whether it is eager PyTorch on a GPU."""
        return self.name == "GPU"

    @property
    def is_e2e_execution(self) -> bool:
        """Whether steps are executed: neither `compile_only` nor `validate_only`."""
        return not (self.compile_only or self.validate_only)

    @property
    def is_tracing(self) -> bool:
        """Whether a step is being traced, in this thread."""
        return self.is_xla and session.trace is not None

    def to_cpu(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` on the host; waits for its value."""
        return tensor.detach().cpu().clone()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs besides weights and optimizers for the same random numbers: plain data."""
        return {"random": self.keys.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the random numbers where `state` was taken.

        Raises:
            CheckpointError: if `state` is not what `state_dict` gives.
        """
        self.keys.load_state_dict(state.get("random", {}))

    def claim(self, tensors: Iterable[torch.Tensor], behind: bool = False) -> None:
        """Make `tensors` live on the backend: real ones are moved, deferred ones are materialized in the background.

        Args:
            behind: the first loss does not need them, as it does not an optimizer's state.
        """
        from .device import placement

        placement.claim(tensors, self.mesh, behind, only_asked_for=not self.is_e2e_execution)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of the models compiled for this backend."""
        return [p for model in self.models for p in model.parameters() if p.requires_grad]


def backend(
    name: str | Backend | None = None,
    *,
    mesh: Any = None,
    cluster_config: ClusterConfig | None = None,
    artifact_dir: str | os.PathLike | None = ARTIFACTS,
    compile_dir: str | os.PathLike | None = None,
    compile_only: bool = False,
    validate_only: bool = False,
    first_loss: str | None = None,
) -> Backend:
    """Make a backend and make it the current one; without arguments, the current one.

    Args:
        name: "XLA" ("CSX" is the same), ahead-of-time compiled on JAX's default device; "CPU" or "GPU", eager PyTorch.
            A backend that was made before becomes the current one again.
        mesh: the devices to share work and weights: a `jax.sharding.Mesh`, or the sizes of its axes by name, as
            `{"fsdp": 4, "tp": 2}`, over JAX's devices in their order. The batch is cut over the axes that are named
            data, dp, fsdp or the like (`docs/meshes.md`). None for one device.
        cluster_config: the same as `mesh={"data": cluster_config.num_csx}`; and how many workers read data.
        artifact_dir: a folder for what is worth keeping between runs.
        compile_dir: where compiled executables are kept for the next start; "compiled" in `artifact_dir` by default.
        compile_only: traced steps are traced, compiled and kept in `compile_dir`, and not executed: no weights are
            made, a `DataExecutor` gives one batch, whose shapes are all that is used of it, and closures do not run.
            What a step returns has no values. A later run with the same `compile_dir` compiles nothing.
        validate_only: the same, but steps are traced and lowered, and not even compiled.
        first_loss: "eager", the default: where a step's weights are new, what its first call returns is computed by
            PyTorch's own kernels as soon as the weights are there, bit for bit as in eager PyTorch, and the step is
            compiled behind it. "compiled": the compiled step computes that, too. The training is the same.

    Raises:
        BackendError: for a name that is none of these, or devices that this machine does not have.
        MissingDependencyError: if "XLA" is asked for and JAX is not installed.
        ShardingError: if `mesh` is none.
    """
    only = {
        "compile_dir": compile_dir,
        "compile_only": compile_only,
        "validate_only": validate_only,
        "first_loss": first_loss,
    }
    if first_loss not in (None, "eager", "compiled"):
        raise BackendError(f"first_loss={first_loss!r}: write 'eager' or 'compiled'.")
    given = {"mesh": mesh, "cluster_config": cluster_config, "artifact_dir": artifact_dir, **only}
    dropped = [word for word, value in given.items() if value not in (None, False) and value is not ARTIFACTS]
    artifact_dir = ARTIFACTS if artifact_dir is None else artifact_dir
    for word in ("compile_only", "validate_only"):
        if not isinstance(only[word], bool):
            raise BackendError(f"{word}={only[word]!r}: write True or False.")
    if compile_only and validate_only:
        raise BackendError("compile_only and validate_only are both asked for. Compiling validates: write the first.")
    if (name is None or isinstance(name, Backend)) and dropped:
        raise BackendError(
            f"{dropped[0]}={given[dropped[0]]!r} belongs to a backend that is made, and this one is there already. "
            f'Make another: firstloss.backend("XLA", {dropped[0]}=...).'
        )
    if name is None:
        if _current is None:
            raise BackendError('there is no backend yet. Make one first: firstloss.backend("XLA").')
        return _current
    if isinstance(name, Backend):
        return _use(name)
    if not isinstance(name, str):
        raise BackendError(
            f'a backend has a name: "XLA", "CPU" or "GPU", and not an object of type {type(name).__name__}.'
        )
    if cluster_config is not None and not hasattr(cluster_config, "num_csx"):
        raise BackendError(
            "cluster_config is a firstloss.distributed.ClusterConfig(num_csx=...), not an object of type "
            f"{type(cluster_config).__name__}."
        )
    if mesh is not None and cluster_config is not None:
        raise BackendError("mesh and cluster_config both say which devices there are. Pass one of them.")
    kind = name.upper()
    if kind in _XLA_NAMES:
        heap.map_arrays()
        with timeline.span("import"):  # JAX and all that is built on it, so that the first step need not wait for it
            require_jax(f"firstloss.backend({name!r})")
            from .jaxlib import use_compilation_cache
            from .mesh.mesh import Mesh
            from .step import executable, notes, trace  # noqa: F401

        if mesh is None and cluster_config is not None and cluster_config.num_csx > 1:
            mesh = {"data": cluster_config.num_csx}
        folder = os.path.abspath(os.path.join(artifact_dir, "compiled") if compile_dir is None else compile_dir)
        made = Backend(
            "XLA",
            str(artifact_dir),
            None if mesh is None else Mesh(mesh),
            cluster_config=cluster_config,
            compile_dir=folder,
            compile_only=compile_only,
            validate_only=validate_only,
            first_loss=first_loss or "eager",
        )
        use_compilation_cache(folder)
        notes.keep_in(os.path.abspath(os.path.join(made.artifact_dir, "lowered")))
    elif kind in _EAGER and (mesh is not None or cluster_config is not None and cluster_config.num_csx > 1):
        raise BackendError(f'backend {name!r} runs on one device. For a mesh use "XLA".')
    elif kind in _EAGER:
        useless = [word for word, value in only.items() if value not in (None, False)]
        if useless:
            raise BackendError(f'backend {name!r} compiles nothing, so {useless[0]} would do nothing. Use "XLA".')
        if kind == "GPU" and not torch.cuda.is_available():
            raise BackendError('backend "GPU" needs CUDA, which this torch does not find. Use "XLA" or "CPU".')
        made = Backend(kind, str(artifact_dir), cluster_config=cluster_config)
    else:
        raise BackendError(f'{name!r} is not a backend. Use "XLA" (also called "CSX"), "CPU" or "GPU".')
    return _use(made)


def _use(chosen: Backend) -> Backend:
    """Make `chosen` the current backend."""
    global _current
    _current = chosen
    set_device_type(chosen.torch_device.type)
    return chosen


@overload
def current_backend(raise_exception: Literal[True] = True) -> Backend: ...


@overload
def current_backend(raise_exception: bool) -> Backend | None: ...


def current_backend(raise_exception: bool = True) -> Backend | None:
    """The backend made last.

    Args:
        raise_exception: False: None if there is none yet.

    Raises:
        BackendError: if there is none yet.
    """
    return backend() if raise_exception else _current


def current_torch_device() -> torch.device:
    """The torch device of the current backend's tensors."""
    return _current.torch_device if _current is not None else torch.device("cpu")


def use_cs() -> bool:
    """Whether the current backend compiles ahead of time."""
    return _current is not None and _current.is_xla
