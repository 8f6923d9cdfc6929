"""The number of steps of a run, and the batch size."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import ExecutorError
from ...runtime.pytrees import flatten


def compute_num_steps(
    dataloader: Any,
    initial_step: int = 0,
    num_steps: int | None = None,
    max_steps: int | None = None,
    num_epochs: int | None = None,
    steps_per_epoch: int | None = None,
    grad_accum_steps: int = 1,
) -> int:
    """The number of updates that a run has left: the smallest of its limits.

    Args:
        dataloader: the loader, whose length, if it has one, is that of an epoch.
        initial_step: updates so far.
        num_steps: updates from here on.
        max_steps: updates in total.
        num_epochs: passes over the loader from here on; not together with `num_steps`.
        steps_per_epoch: batches in an epoch; at most the loader's length.
        grad_accum_steps: batches per update.

    Returns:
        The number of updates.

    Raises:
        ExecutorError: for numbers that are not positive, contradict each other, or leave no step to run.
    """
    given = {"num_steps": num_steps, "max_steps": max_steps, "num_epochs": num_epochs}
    for name, value in {**given, "steps_per_epoch": steps_per_epoch, "grad_accum_steps": grad_accum_steps}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ExecutorError(f"{name}={value!r} is not a positive integer.")
    if not isinstance(initial_step, int) or initial_step < 0:
        raise ExecutorError(f"initial_step={initial_step!r} is not an integer of at least 0.")
    if num_steps is not None and num_epochs is not None:
        raise ExecutorError(
            f"num_steps={num_steps} and num_epochs={num_epochs} both set the duration. Pass one of them."
        )
    if all(value is None for value in given.values()):
        raise ExecutorError("there is no limit: pass num_steps, max_steps or num_epochs.")
    ends = [] if num_steps is None else [num_steps]
    if max_steps is not None:
        if max_steps <= initial_step:
            raise ExecutorError(f"nothing is left to do: initial_step={initial_step} and max_steps={max_steps}.")
        ends.append(max_steps - initial_step)
    if num_epochs is not None:
        ends.append(num_epochs * epoch_steps(dataloader, steps_per_epoch, grad_accum_steps))
    return min(ends)


def epoch_steps(dataloader: Any, steps_per_epoch: int | None, grad_accum_steps: int) -> int:
    """The number of updates in an epoch."""
    try:
        batches = len(dataloader)
    except (TypeError, NotImplementedError):
        raise ExecutorError(
            "an epoch of a loader without a length has no known number of steps. Pass num_steps instead."
        ) from None
    if steps_per_epoch is not None and steps_per_epoch > batches:
        raise ExecutorError(f"steps_per_epoch={steps_per_epoch}, but an epoch has {batches} batches.")
    batches = batches if steps_per_epoch is None else steps_per_epoch
    if grad_accum_steps > batches:
        raise ExecutorError(f"grad_accum_steps={grad_accum_steps}, but an epoch has {batches} batches.")
    return batches // grad_accum_steps


def infer_batch_size(data: Any, batch_size: int | None = None) -> int | None:
    """The batch size: the first dimension of a batch's tensors.

    Args:
        data: tensors in lists, tuples, dicts and dataclasses. A scalar tensor counts as one row.
        batch_size: the expected batch size.

    Returns:
        The batch size; None if the tensors differ.

    Raises:
        ExecutorError: if there are no tensors, or the batch size is not `batch_size`.
    """
    sizes = {leaf.shape[0] if leaf.dim() else 1 for leaf in flatten(data)[0] if isinstance(leaf, torch.Tensor)}
    if not sizes:
        raise ExecutorError("this batch holds no tensors.")
    size = sizes.pop() if len(sizes) == 1 else None
    if batch_size is not None and size != batch_size:
        raise ExecutorError(f"a batch has {size or 'several numbers of'} rows, not {batch_size}.")
    return size
