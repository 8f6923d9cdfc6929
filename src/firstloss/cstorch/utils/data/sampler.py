"""`DistributedSampler`, with the order of `cerebras.pytorch`'s: it does not depend on the number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ....distributed import get_streaming_rank, num_streamers
from ....errors import LoaderError


class DistributedSampler(torch.utils.data.Sampler[Any]):
    """Indices, or batches of them, of a dataset; each process gets its part of each batch.

    An epoch is shuffled by `seed` plus its number, so that it is the same in all processes and when resumed.

    Args:
        data_source: a dataset with a length.
        shuffle: whether to shuffle.
        seed: of the shuffling; required for it.
        start_index: how many samples a previous run has drawn, in all processes.
        shard: whether each process gets its part only.
        batch_size: in all processes together; None: indices one by one.
        drop_last: whether to leave out a last batch that is smaller.
        num_samples: the length of an epoch; by default that of the dataset, which is repeated or cut to it.
        pad_last: whether to fill up the last batch, from the beginning of the epoch.

    Raises:
        LoaderError: for arguments that do not fit together.
    """

    def __init__(
        self,
        data_source: Any,
        shuffle: bool = True,
        seed: int | None = None,
        start_index: int = 0,
        shard: bool = True,
        batch_size: int | None = None,
        drop_last: bool = True,
        num_samples: int | None = None,
        pad_last: bool = False,
    ) -> None:
        if shuffle and seed is None:
            raise LoaderError("a DistributedSampler that shuffles needs a seed, to shuffle alike in all processes.")
        if shard and batch_size is None and num_streamers() > 1:
            raise LoaderError("a DistributedSampler that shards needs the batch_size of all processes together.")
        if shard and batch_size is not None and batch_size % num_streamers():
            raise LoaderError(f"batch_size={batch_size} is not a multiple of the {num_streamers()} processes.")
        self.data_source = data_source
        self.num_samples: int = len(data_source) if num_samples is None else num_samples
        if self.num_samples < 1:
            raise LoaderError("a DistributedSampler needs a dataset that is not empty.")
        self._shuffle, self._seed, self._shard = shuffle, seed, shard
        self._batch_size, self._drop_last, self._pad_last = batch_size, drop_last, pad_last
        self.set_state(start_index)

    def set_state(self, start_index: int) -> None:
        """Go on after `start_index` samples, counted over epochs and processes."""
        self.epoch: int
        self.epoch, self._start = divmod(start_index, self.num_samples)

    def __iter__(self) -> Iterator[Any]:
        order = self._order()
        indices = order[self._start :]
        self.epoch, self._start = self.epoch + 1, 0
        if self._batch_size is None:
            yield from indices
            return
        for begin in range(0, len(indices), self._batch_size):
            batch = indices[begin : begin + self._batch_size]
            if len(batch) < self._batch_size:
                if self._drop_last:
                    return
                if self._pad_last:
                    batch += list(itertools.islice(itertools.cycle(order), self._batch_size - len(batch)))
            if self._shard and num_streamers() > 1:
                part = self._batch_size // num_streamers()
                batch = batch[part * get_streaming_rank() : part * (get_streaming_rank() + 1)]
            yield batch

    def _order(self) -> list[int]:
        length = len(self.data_source)
        if not self._shuffle:
            return [index % length for index in range(self.num_samples)]
        assert self._seed is not None
        generator = torch.Generator().manual_seed(self._seed + self.epoch)
        if self.num_samples <= length:
            return torch.randperm(length, generator=generator)[: self.num_samples].tolist()
        whole = -(-self.num_samples // length) - 1
        repeated = [torch.arange(length)] * whole + [torch.randperm(length, generator=generator)]
        return torch.cat(repeated)[: self.num_samples][torch.randperm(self.num_samples, generator=generator)].tolist()

    def __len__(self) -> int:
        left = self.num_samples - self._start
        if self._batch_size is None:
            return left
        return left // self._batch_size if self._drop_last else -(-left // self._batch_size)
