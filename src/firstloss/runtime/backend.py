"""The Backend class, its device, and the current backend."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ..amp.precision import set_device_type
from ..capture import session
from ..capture.deferred import deferred
from ..errors import BackendError
from ..settings import Settings, check_name
from .cluster_config import ClusterConfig
from .device.eager_initialization import moving_eagerly
from .device.step_keys import Keys
from .lazy_jax import process_count

if TYPE_CHECKING:
    from .mesh.mesh import Mesh

EAGER = {"CPU": "cpu", "GPU": "cuda"}  # backends without a compiler, and their torch devices

_current: Backend | None = None


@dataclass
class DeviceConfig(Settings):
    """How weights are placed on the device.

    Attributes:
        lazy_initialization: capture constructors under `with backend.device`, and materialize weights while the step
            compiles. If False, constructors run eagerly, and each weight is moved once its module is constructed, so
            that host memory holds those of one module at a time. On the eager backends constructors always run eagerly.

    Raises:
        BackendError: if it is neither True nor False.
    """

    lazy_initialization: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.lazy_initialization, bool):
            raise BackendError(f"lazy_initialization={self.lazy_initialization!r}: write True or False.")


_numbers = itertools.count()


class Models:
    """The models compiled for a backend, of those that still exist: it does not keep them alive.

    With several processes it does. These must find the same models at each call, which garbage collection would free at
    a time of its own in each.
    """

    def __init__(self) -> None:
        self._references: dict[int, Callable[[], torch.nn.Module | None]] = {}

    def add(self, model: torch.nn.Module) -> None:
        """Add a model, if it is new."""
        if all(each is not model for each in self):
            self._references[next(_numbers)] = weakref.ref(model) if process_count() == 1 else lambda: model

    def numbered(self) -> dict[int, torch.nn.Module]:
        """The models, by numbers that are theirs in this process."""
        references = list(self._references.items())
        return {number: model for number, each in references if (model := each()) is not None}

    @property
    def newest(self) -> int:
        """The number of the newest of them; 0 if there are none."""
        return max(self.numbered(), default=0)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter(self.numbered().values())

    def __len__(self) -> int:
        return len(self.numbered())


class Device(str):
    """A backend's device; as a context manager, it makes weights constructed inside belong to the backend.

    As an argument of PyTorch's functions (`torch.ones(2, device=backend.device)`, `tensor.to(backend.device)`), it is
    the name of `backend.torch_device`, where batches are made before they are transferred.
    """

    _backend: Backend

    def __new__(cls, backend: Backend) -> Device:
        return super().__new__(cls, backend.torch_device)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.config: DeviceConfig = DeviceConfig()
        self._open: list[AbstractContextManager[Any]] = []

    def __setattr__(self, name: str, value: Any) -> None:
        check_name(self, name, ("_backend", "config", "_open"))
        if name == "config" and not isinstance(value, DeviceConfig):
            raise BackendError(f"device.config is a DeviceConfig, not an object of type {type(value).__name__}.")
        object.__setattr__(self, name, value)

    def __enter__(self) -> Device:
        if self._backend.is_xla:
            context: AbstractContextManager[Any] = (
                deferred() if self.config.lazy_initialization else moving_eagerly(self._backend)
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
    """Where training runs; created by `firstloss.backend`."""

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
        self.is_xla: bool = name == "XLA"
        self.torch_device: torch.device = torch.device(EAGER.get(name, "cpu"))
        self.device: Device = Device(self)
        self.models: Models = Models()
        self.keys: Keys = Keys()
        self.mesh = mesh
        self.first_loss = first_loss
        self.stepped = False  # whether a step has run on this backend
        self._made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("device", "models", "keys", "stepped") and "_made" in self.__dict__:
            check_name(self, name, self.__dict__)
            raise BackendError(
                f"a backend's {name} cannot be changed once it is created: firstloss.backend(..., {name}=...)."
            )
        object.__setattr__(self, name, value)

    @property
    def same_run(self) -> int | None:
        """The number of logical shards of its steps; None if XLA divides them."""
        return None if self.mesh is None else self.mesh.same_run

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
    def replays(self) -> bool:
        """Whether it replays traced steps as CUDA graphs: PyTorch's kernels without Python between them."""
        return self.is_gpu

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
        """The state of the steps' random numbers, for a checkpoint."""
        return {"random": self.keys.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the random numbers' state.

        Raises:
            CheckpointError: if `state` is not what `state_dict` returns.
        """
        self.keys.load_state_dict(state.get("random", {}))

    def move_to_device(self, tensors: Iterable[torch.Tensor], behind: bool = False) -> None:
        """Move `tensors` to the backend: real ones are transferred, deferred ones are materialized in the background.

        Args:
            behind: whether the first loss does not need them (an optimizer's state, for example).
        """
        if not self.is_xla:  # eager PyTorch's tensors stay where they are
            return
        from .device import placement

        executes = self.is_e2e_execution
        first = executes and self.first_loss == "eager" and not self.stepped
        placement.move_to_device(tensors, self.mesh, behind, on_demand=not executes, for_kernels=first)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The trainable parameters of the models compiled for this backend."""
        return [p for model in self.models for p in model.parameters() if p.requires_grad]


def make_current(chosen: Backend) -> Backend:
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
    """The backend that was made current last.

    Examples:
        >>> backend = fl.backend("CPU")
        >>> fl.current_backend() is backend
        True

    Args:
        raise_exception: if False, return None rather than raise.

    Returns:
        The backend; None if there is none yet and `raise_exception` is False.

    Raises:
        BackendError: if there is none yet.
    """
    if _current is None and raise_exception:
        raise BackendError('there is no backend yet. Create one first: firstloss.backend("XLA").')
    return _current


def current_torch_device() -> torch.device:
    """The torch device of the current backend's tensors.

    Returns:
        The device; the CPU if there is no backend yet.
    """
    return _current.torch_device if _current is not None else torch.device("cpu")


def use_cs() -> bool:
    """Whether the current backend compiles ahead of time.

    Returns:
        False if it does not, or if there is no backend yet.
    """
    return _current is not None and _current.is_xla
