"""The base of all metrics."""

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
    """A number of a whole run, of which each step adds its part.

    A subclass defines `reset`, which registers the state with `register_state`, `update`, which adds to it in place,
    and `compute`. It is called with the arguments of `update`, and returns the number of what has been added so far.

    Part of a model, its state comes to the backend with the model's weights; by itself, with the first traced step that
    adds to it. It is no part of the model's `state_dict`, unless the state is persistent.

    Args:
        name: under which it is reported; by default that of its class.
    """

    _updates: torch.Tensor

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name or type(self).__name__
        self._dtype: torch.dtype | None = None
        self.register_buffer("_updates", torch.zeros((), dtype=torch.int64), persistent=False)
        self.reset()
        _all[:] = [ref for ref in _all if ref() is not None]
        _all.append(weakref.ref(self))

    @property
    def num_updates(self) -> int:
        """How often something has been added since `reset`; not in a traced step, which has no values."""
        return int(self._updates)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, around in (("reset", _begun_anew), ("update", _counted), ("compute", _once_there_is_something)):
            own = vars(cls).get(name)
            if own is not None:
                setattr(cls, name, around(own))

    def reset(self) -> None:
        """Start over: register the state, as it is before the first update."""
        raise NotImplementedError(f"{type(self).__name__} has to define reset()")

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch to the state, in place.

        Args:
            *args, **kwargs: a subclass says which.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define update(...)")

    def compute(self) -> Any:
        """The number of all that has been added.

        Returns:
            What a subclass says: a tensor without dimensions, for those here.

        Raises:
            MetricError: if that is nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} has to define compute()")

    def register_state(self, name: str, tensor: torch.Tensor, persistent: bool = False) -> None:
        """Keep `tensor` as the attribute `name`. Done again, the state takes its values.

        Args:
            name: of the attribute.
            tensor: of any shape and dtype.
            persistent: it is part of `state_dict`.
        """
        known = buffers_of(self).get(name)
        if known is None or known.shape != tensor.shape or known.dtype != tensor.dtype:
            self.register_buffer(name, tensor, persistent=persistent)
            return
        with torch.no_grad():
            known.copy_(tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`update`, and then `compute`.

        Args:
            *args, **kwargs: as `update` takes them.

        Returns:
            What `compute` returns.
        """
        self.update(*args, **kwargs)
        return self.compute()

    def __float__(self) -> float:
        return float(self.compute())

    def _in_dtype(self, value: torch.Tensor) -> torch.Tensor:
        return value if self._dtype is None else value.to(self._dtype)


def _begun_anew(reset: Any) -> Any:
    @functools.wraps(reset)
    def wrapped(self: Metric) -> None:
        reset(self)
        with torch.no_grad():
            self._updates.zero_()
        self._dtype = None

    return wrapped


def _counted(update: Any) -> Any:
    @functools.wraps(update)
    @torch.no_grad()
    def wrapped(self: Metric, *args: Any, **kwargs: Any) -> None:
        update(self, *args, **kwargs)
        self._updates.add_(1)

    return wrapped


def _once_there_is_something(compute: Any) -> Any:
    @functools.wraps(compute)
    @torch.no_grad()
    def wrapped(self: Metric) -> Any:
        if not torch.compiler.is_compiling() and self.num_updates == 0:
            raise MetricError(f"the metric {self.name!r} is asked for, and nothing has been added to it since reset().")
        return compute(self)

    return wrapped


def get_all_metrics() -> Iterator[tuple[str, Metric]]:
    """The metrics that there are, in the order in which they were made.

    Yields:
        (name, metric). Where several have one name, it is "name.0", "name.1" and so on.
    """
    there = [metric for ref in _all if (metric := ref()) is not None]
    for metric in there:
        same = [other for other in there if other.name == metric.name]
        number = next(i for i, other in enumerate(same) if other is metric)
        yield (metric.name if len(same) == 1 else f"{metric.name}.{number}"), metric


def compute_all_metrics() -> dict[str, Any]:
    """Compute each metric to which something has been added.

    Returns:
        What `compute` gives, by the names of `get_all_metrics`.
    """
    return {name: metric.compute() for name, metric in get_all_metrics() if metric.num_updates}
