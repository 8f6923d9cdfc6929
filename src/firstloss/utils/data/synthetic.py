"""Synthetic datasets of given shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset

from ...compat.torch_names import pytree
from ...errors import LoaderError
from ...runtime.pytrees import flatten


class SyntheticDataset(IterableDataset[Any]):
    """Samples made from a spec, for speed tests, and for `backend(compile_only=True)`, which needs only shapes.

    Workers divide the samples among them.

    Args:
        sample_spec: a sample, as lists, tuples, dicts and dataclasses of tensors, which are copied, or of functions
            that return a tensor for a sample's index.
        num_samples: the number of samples; None: endless, without a length.

    Raises:
        LoaderError: if the spec holds anything else, or nothing.
    """

    def __init__(self, sample_spec: Any, num_samples: int | None = None) -> None:
        if num_samples is not None and (
            not isinstance(num_samples, int) or isinstance(num_samples, bool) or num_samples < 1
        ):
            raise LoaderError(f"num_samples={num_samples!r} is not a positive integer.")
        self._parts, self._spec = flatten(sample_spec)
        wrong = [part for part in self._parts if not isinstance(part, torch.Tensor) and not callable(part)]
        if wrong or not self._parts:
            description = f"an object of type {type(wrong[0]).__name__}" if wrong else "nothing"
            raise LoaderError(
                f"sample_spec holds {description}, but should hold tensors, or functions of the sample's index: "
                '{"input_ids": torch.zeros(128, dtype=torch.long), "label": lambda i: torch.tensor(i % 10)}.'
            )
        self._num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self._num_samples is None or number < self._num_samples:
            yield pytree.tree_unflatten([_made(part, number) for part in self._parts], self._spec)
            number += step

    def __len__(self) -> int:
        if self._num_samples is None:
            raise TypeError("this SyntheticDataset has no length: it was created without num_samples.")
        return self._num_samples


def _made(part: torch.Tensor | Callable[[int], Any], number: int) -> Any:
    return part.clone() if isinstance(part, torch.Tensor) else part(number)
