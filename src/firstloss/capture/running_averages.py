"""Patches of running averages that read a counter, which has no value in a traced step.

`BatchNorm(momentum=None)` weights a batch by one over `num_batches_tracked`, which it reads as a Python number.
`AveragedModel.update_parameters` branches on `n_averaged`. In a traced step both are computed with tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn

from ..compat.patches import replaces
from ..compat.torch_names import input_check
from . import session


@replaces("torch.nn.modules.batchnorm._BatchNorm.forward")
def batch_norm(original: Callable[..., torch.Tensor], self: Any, x: torch.Tensor) -> torch.Tensor:
    """As `_BatchNorm.forward`."""
    return _normalized(self, x, original)


@replaces("torch.nn.SyncBatchNorm.forward")
def sync_batch_norm(original: Callable[..., torch.Tensor], self: Any, x: torch.Tensor) -> torch.Tensor:
    """As `SyncBatchNorm.forward`, without communication: a traced step has the global batch."""
    return _normalized(self, x, original)


def _normalized(self: Any, x: torch.Tensor, original: Callable[..., torch.Tensor]) -> torch.Tensor:
    cumulative = self.momentum is None and self.training and self.track_running_stats
    if session.trace is None or not cumulative or self.num_batches_tracked is None or self.running_mean is None:
        return original(self, x)
    input_check(self)(x)
    self.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(self.running_mean), torch.zeros_like(self.running_var)
    out = torch.nn.functional.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
    with torch.no_grad():
        part = 1.0 / self.num_batches_tracked.double()
        for running, batch in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(batch * part + running * (1.0 - part))
    return out


@replaces("torch.optim.swa_utils.AveragedModel.update_parameters")
@torch.no_grad()
def update_parameters(original: Any, self: AveragedModel, model: Any) -> None:
    """As `AveragedModel.update_parameters`; selects between the average and the first weights with torch.where."""
    if session.trace is None:
        original(self, model)
        return
    averages = chain(self.module.parameters(), self.module.buffers()) if self.use_buffers else self.parameters()
    weights = chain(model.parameters(), model.buffers()) if self.use_buffers else model.parameters()
    pairs = [(a.detach(), p.detach().to(a.device)) for a, p in zip(averages, weights, strict=False)]
    count = self.n_averaged
    first = count == 0
    before = [a.clone() for a, _ in pairs]
    if self.multi_avg_fn is not None:
        kinds: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for a, p in pairs:
            kinds.setdefault((a.device, a.dtype), []).append((a, p))
        for (device, _), group in kinds.items():
            self.multi_avg_fn([a for a, _ in group], [p for _, p in group], count.to(device))
    else:
        average = self.avg_fn or get_swa_avg_fn()
        for (a, p), old in zip(pairs, before, strict=True):
            a.copy_(average(old, p, count.to(a.device)))
    for a, p in pairs:
        a.copy_(torch.where(first, p, a))
    if not self.use_buffers:
        for buffer, source in zip(self.module.buffers(), model.buffers(), strict=True):
            buffer.detach().copy_(source.detach().to(buffer.device))
    self.n_averaged += 1
