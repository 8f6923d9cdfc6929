"""The base class of metrics, and the list of all metrics."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from ..compat.torch_names import buffers_of
from ..errors import MetricError

_all: list[weakref.ref[Metric]] = []


class Metric(torch.nn.Module):
    """Base class of metrics: numbers that are accumulated over steps.

    A subclass defines `reset`, which registers the state with `register_state`; `update`, which adds to it in place;
    and `compute`. Calling a metric calls `update` with the arguments, and returns the value of `compute` so far.

    The state of a metric that is part of a model moves to the backend with the model's weights; otherwise, with the
    first traced step that updates it. It is not part of the model's `state_dict`, unless it is persistent.

    Args:
        name: the name for reports; by default the class's.
    """

    _updates: torch.Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name: str = name or type(self).__name__
        self._dtype: torch.dtype | None = None
        self.register_buffer("_updates", torch.zeros((), dtype=torch.int64), persistent=False)
        self.reset()
        _all[:] = [ref for ref in _all if ref() is not None]
        _all.append(weakref.ref(self))

    @property
    def num_updates(self) -> int:
        """The number of updates since `reset`; not available in a traced step, which has no values."""
        return int(self._updates)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, around in (("reset", _resetting), ("update", _counting), ("compute", _after_updates)):
            own = vars(cls).get(name)
            if own is not None:
                setattr(cls, name, around(own))

    def reset(self) -> None:
        """Reset: register the initial state."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch to the state, in place.

        Args:
            *args, **kwargs: defined by the subclass.
        """
        raise NotImplementedError(f"{type(self).__name__} must define update(...)")

    def compute(self) -> Any:
        """The value of the metric.

        Returns:
            Defined by the subclass; a scalar tensor for the metrics here.

        Raises:
            MetricError: if there has been no update.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute()")

    def register_state(self, name: str, tensor: torch.Tensor, persistent: bool = False) -> None:
        """Register `tensor` as the state `name`. If it is registered already, the state takes its values.

        Args:
            name: the attribute's name.
            tensor: of any shape and dtype.
            persistent: whether it is part of `state_dict`.
        """
        known = buffers_of(self).get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            self.register_buffer(name, tensor, persistent=persistent)
            return
        with torch.no_grad():
            known.copy_(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call `update`, and return `compute()`.

        Args:
            *args, **kwargs: passed to `update`.

        Returns:
            What `compute` returns.
        """
        self.update(*args, **kwargs)
        return self.compute()

    def __float__(self) -> float:
        return float(self.compute())

    def _in_dtype(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._dtype is None else value.to(self._dtype)


def _resetting(reset: Any) -> Any:
    @functools.wraps(reset)
    def wrapped(self: Metric) -> None:
        reset(self)
        with torch.no_grad():
            self._updates.zero_()
        self._dtype = None

    return wrapped


def _counting(update: Any) -> Any:
    @functools.wraps(update)
    @torch.no_grad()
    def wrapped(self: Metric, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        self._updates.add_(1)

    return wrapped


def _after_updates(compute: Any) -> Any:
    @functools.wraps(compute)
    @torch.no_grad()
    def wrapped(self: Metric) -> Any:
        if not torch.compiler.is_compiling() and self.num_updates == 0:
            raise MetricError(f"the metric {self.name!r} has not been updated since reset(), so it has no value.")
        return compute(self)

    return wrapped


def get_all_metrics() -> Iterator[tuple[str, Metric]]:
    """All existing metrics, in the order in which they were created.

    Yields:
        (name, metric). If several have the same name, it becomes "name.0", "name.1" and so on.
    """
    existing = [metric for ref in _all if (metric := ref()) is not None]
    for metric in existing:
        same = [other for other in existing if other.name == metric.name]
        number = next(i for i, other in enumerate(same) if other is metric)
        yield (metric.name if len(same) == 1 else f"{metric.name}.{number}"), metric


def compute_all_metrics() -> dict[str, Any]:
    """Compute every metric that has been updated.

    Returns:
        The values of `compute`, by the names of `get_all_metrics`.
    """
    return {name: metric.compute() for name, metric in get_all_metrics() if metric.num_updates}
