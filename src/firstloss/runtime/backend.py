"""Backends: where training runs."""

from __future__ import annotations

from collections.abc import Iterable
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

if TYPE_CHECKING:
    from .mesh.mesh import Mesh

EAGER = {"CPU": "cpu", "GPU": "cuda"}  # the backends that compile nothing, and PyTorch's devices

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
        self.torch_device = torch.device(EAGER.get(name, "cpu"))
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
        """What a checkpoint needs besides weights and optimizers for the same random numbers: plain data."""
        return {"random": self.keys.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the random numbers where `state` was taken.

        Raises:
            CheckpointError: if `state` is not what `state_dict` gives.
        """
        self.keys.load_state_dict(state.get("random", {}))

    def move_to_device(self, tensors: Iterable[torch.Tensor], behind: bool = False) -> None:
        """Make `tensors` live on the backend: real ones are moved, deferred ones are materialized in the background.

        Args:
            behind: the first loss does not need them, as it does not an optimizer's state.
        """
        if not self.is_xla:  # what eager PyTorch works on stays where it is
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
    """The backend made last.

    Examples:
        >>> backend = fl.backend("CPU")
        >>> fl.current_backend() is backend
        True

    Args:
        raise_exception: False: None if there is none yet.

    Returns:
        The backend; None if there is none yet and `raise_exception` is False.

    Raises:
        BackendError: if there is none yet.
    """
    if _current is None and raise_exception:
        raise BackendError('there is no backend yet. Make one first: firstloss.backend("XLA").')
    return _current


def current_torch_device() -> torch.device:
    """The torch device of the current backend's tensors.

    Returns:
        The CPU, where there is no backend yet.
    """
    return _current.torch_device if _current is not None else torch.device("cpu")


def use_cs() -> bool:
    """Whether the current backend compiles ahead of time.

    Returns:
        False, where there is no backend yet.
    """
    return _current is not None and _current.is_xla
