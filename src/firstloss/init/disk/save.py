"""Initialize a model of any size directly to safetensors files, without holding whole weights in memory.

A file is split into pieces of a few MiB. Each thread processes ranges of pieces: it makes the tensors in a piece in its
own buffer, and writes it; while one thread waits for the disk, another draws. So memory holds one buffer per thread,
regardless of the size of the model.

Files are written to a hidden folder in the target folder, with a journal of the ranges that are on disk, and moved when
all are complete; until then the target folder contains nothing that could be taken for a model.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from ... import timeline
from ...compat.torch_names import DisableTorchDispatch, InferenceMode
from ...engine.cpu_engine import materialize_whole
from ...engine.reader import Reader, WholeValueCache
from ...errors import SaveError
from ...files import atomic_write, exists, is_folder, is_of_the_system, remove_folder, sync_folder
from ...interpreter import cores
from ...program.fingerprint import fingerprint
from ...workers import Workers
from . import layout
from .direct_file import BLOCK, DirectFile, aligned
from .journal import Journal
from .safetensors_file import FileLayout, TensorMeta
from .state_dict import SavedTensor, config_names, tensors_to_save, write_configs

_PIECE = 2 << 20  # bytes drawn and written at a time: a multiple of BLOCK
_RUN = 32 * _PIECE  # bytes of a range, which one thread writes
_SYNC = 1 << 30  # bytes between syncs, which stall the disk; each is followed by a journal entry
_INDEX = "model.safetensors.index.json"
_COMPLETE = "complete"  # the journal entry when all files are complete in the work folder, or already moved


def save_initialized(
    module: torch.nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weights of a deferred module to `directory`, as `save_pretrained` would write the eager ones.

    The module stays deferred. Names, shards, index and configuration files are those of transformers' `save_pretrained`
    (tied weights once, no non-persistent buffers), so `from_pretrained` can load the folder. Other modules are saved in
    the same layout, for `safetensors.torch.load_file` or `load_model`. Real tensors are written, too. Weights are made
    piece by piece if their recipes allow it; others are held in memory as a whole, a few at a time.

    A run that was killed or failed leaves a hidden folder in `directory`, from which the same call resumes; any other
    call starts again. When all files are complete, those of an earlier save are replaced or removed.

    Examples:
        >>> fl.save_initialized(fl.deferred_init(nn.Linear, 8, 4), "weights")
        >>> model = fl.deferred_init(nn.Linear, 8, 4)
        >>> model.load_state_dict(fl.load("weights"))
        <All keys matched successfully>

    Args:
        module: a Module, some of whose parameters and buffers are deferred.
        directory: created if it does not exist.
        max_shard_size: the maximum size of a file, in bytes or as "200MB" (decimal) or "2GiB"; a larger tensor gets a
            file of its own.
        progress: called from time to time with (bytes written, bytes in total), from any thread, one call at a time.

    Raises:
        SaveError: if there is not enough space (with the bytes needed and free) or no permission, or if safetensors
            cannot hold a tensor.
        ValueError: if `max_shard_size` is malformed.
    """
    limit = layout.parse_size(max_shard_size)
    with timeline.span("save"), InferenceMode(False):
        saved, omitted = tensors_to_save(module)
        plan = _plan(saved, limit, omitted)
        digest = fingerprint((s.ref for s in saved), [s.name for s in saved], limit, omitted, _RUN)
        target = os.fspath(directory)
        work = os.path.join(target, f".init-{digest[:16]}.part")
        with _explained(target, plan):
            os.makedirs(work, exist_ok=True)
            _remove_other_work(target, work)
            with Journal(os.path.join(work, "journal")) as journal:
                if _COMPLETE not in journal.done:
                    _write_all(plan, work, journal, progress)
                    _write_index(plan, work, module)
                    write_configs(module, work)
                    sync_folder(work)
                    journal.add(_COMPLETE)
                _move_out(plan, work, target)
            remove_folder(work)


# -- the plan ----------------------------------------------------------------------------------------------------------


class _File(NamedTuple):
    """One of the files; `tensors` are in the order of `layout.extents`."""

    name: str
    layout: FileLayout
    head: bytes
    tensors: list[SavedTensor]

    @property
    def data(self) -> int:
        """Bytes of data, without the header."""
        return self.layout.size

    @property
    def size(self) -> int:
        return len(self.head) + self.data


class _ByteRange(NamedTuple):
    """Bytes [begin, end) of a file's data, written by one thread."""

    file: _File
    begin: int
    end: int

    @property
    def line(self) -> str:
        return f"{self.file.name} {self.begin}"


def _plan(saved: list[SavedTensor], limit: int, omitted: dict[str, str]) -> list[_File]:
    groups = layout.split([s.nbytes for s in saved], limit)
    files = []
    for name, group in zip(layout.file_names(len(groups)), groups, strict=True):
        tensors = [saved[i] for i in group]
        names = {tensor.name for tensor in tensors}
        metadata = {"format": "pt", **{alias: other for alias, other in omitted.items() if other in names}}
        metas = [TensorMeta(tensor.name, tensor.ref.dtype, tensor.ref.size, tensor.nbytes) for tensor in tensors]
        offsets = FileLayout(metas, BLOCK)
        files.append(_File(name, offsets, offsets.head(metadata), [tensors[which] for which, _, _ in offsets.extents]))
    return files


def _ranges(file: _File) -> list[_ByteRange]:
    return [_ByteRange(file, begin, min(begin + _RUN, file.data)) for begin in range(0, file.data, _RUN)]


# -- writing -----------------------------------------------------------------------------------------------------------


def _write_all(
    plan: list[_File],
    work: str,
    journal: Journal,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Write all ranges that are not in the journal."""
    total = sum(file.data for file in plan)
    missing = {file.name: [run for run in _ranges(file) if run.line not in journal.done] for file in plan}
    for file in plan:
        path = os.path.join(work, file.name)
        if file.name in journal.done and os.path.getsize(path) == file.size:
            missing[file.name] = []
        elif not exists(path):
            missing[file.name] = _ranges(file)
    needed = sum(run.end - run.begin for runs in missing.values() for run in runs)
    _check_space(work, needed)
    written = total - needed
    lock = threading.Lock()

    def count(nbytes: int) -> None:
        nonlocal written
        with lock:
            written += nbytes
            if progress is not None:
                progress(written, total)

    writer = _Writer(count)
    for file in plan:
        if file.name in journal.done and not missing[file.name]:
            continue
        with file.layout.written(os.path.join(work, file.name), functools.partial(bytes, file.head)) as out:
            writer.write(file, missing[file.name], out, journal)
        journal.add(file.name)


class _Writer:
    """Makes pieces and writes them, with a pool of threads."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._stop = threading.Event()
        self._whole_values = WholeValueCache(materialize_whole)
        self._this_thread = threading.local()
        self._written: list[_ByteRange] = []  # not synced yet
        self._lock = threading.Lock()

    def write(self, file: _File, runs: list[_ByteRange], out: DirectFile, journal: Journal) -> None:
        """Write ranges of `file`, and add them to the journal when they are on disk."""
        # Two threads per core: one draws while the other waits for the disk.
        try:
            with Workers(2 * cores(), "firstloss-save") as workers:
                tasks = [workers.submit(self._write_run, run, out, journal) for run in runs]
                try:
                    for task in tasks:
                        task.result()
                except BaseException:
                    self._stop.set()
                    raise
        except BaseException:
            with suppress(OSError):
                self._sync(out, journal)
            raise
        self._sync(out, journal)

    def _write_run(self, run: _ByteRange, out: DirectFile, journal: Journal) -> None:
        own = self._this_thread
        if not hasattr(own, "buffer"):
            own.buffer, own.reader = aligned(_PIECE), Reader(self._whole_values)
        with torch.no_grad(), DisableTorchDispatch():
            for begin in range(run.begin, run.end, _PIECE):
                if self._stop.is_set():
                    return
                end = min(begin + _PIECE, run.end)
                self._make(run.file, begin, end, own.reader, own.buffer)
                whole_blocks = -(-(end - begin) // BLOCK) * BLOCK
                out.write(own.buffer[:whole_blocks], len(run.file.head) + begin)
                self._count(end - begin)
        with self._lock:
            self._written.append(run)
            enough = sum(run.end - run.begin for run in self._written) >= _SYNC
        if enough:
            self._sync(out, journal)

    def _sync(self, out: DirectFile, journal: Journal) -> None:
        """Sync the ranges written so far, and add them to the journal."""
        with self._lock:
            written, self._written = self._written, []
        if written:
            out.sync()
            journal.add(*(run.line for run in written))

    def _make(self, file: _File, begin: int, end: int, reader: Reader, buffer: torch.Tensor) -> None:
        """Make bytes [begin, end) of a file's data in `buffer`."""
        for extent, tensor in zip(file.layout.extents, file.tensors, strict=True):
            low, high = max(extent.begin, begin), min(extent.end, end)
            if low >= high:
                continue
            ref = tensor.ref
            part = buffer[low - begin : high - begin].view(ref.dtype)
            first = (low - extent.begin) // ref.dtype.itemsize
            flat = ref._replace(size=(part.numel(),), stride=(1,), offset=ref.offset + first)
            reader.materialize(flat, None, part)


# -- finishing ---------------------------------------------------------------------------------------------------------


def _write_index(plan: list[_File], work: str, module: torch.nn.Module) -> None:
    if len(plan) == 1:
        return
    metadata = {"total_size": sum(file.data for file in plan)}
    count: Any = getattr(module, "num_parameters", None)
    if callable(count):  # as transformers writes it
        metadata["total_parameters"] = count()
    weight_map = {tensor.name: file.name for file in plan for tensor in file.tensors}
    index = {"metadata": metadata, "weight_map": weight_map}
    with atomic_write(os.path.join(work, _INDEX), "w") as out:
        json.dump(index, out, indent=2, sort_keys=True)
        out.write("\n")


def _move_out(plan: list[_File], work: str, target: str) -> None:
    """Move all files to the target, the one that makes it a model last. Can be repeated after an interrupt."""
    names = [file.name for file in plan]
    stale = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
    waiting = {name for name in (*names, _INDEX) if exists(os.path.join(work, name))}
    if waiting:  # else an earlier run has moved everything, but not removed its work folder
        for name in sorted(os.listdir(target), reverse=True):  # the index, and the single file, before the parts
            if stale.fullmatch(name) and (name in waiting or name not in names):
                os.remove(os.path.join(target, name))
    for name in [*config_names(work), *names, *([_INDEX] if len(names) > 1 else [])]:
        _move(os.path.join(work, name), os.path.join(target, name))
    sync_folder(target)


def _move(source: str, target: str) -> None:
    if exists(source):
        os.replace(source, target)
    elif not exists(target):
        raise SaveError(f"{source} was removed before it could be moved to {target}: save again")


def _remove_other_work(target: str, work: str) -> None:
    """Remove the work folders of unfinished saves of other models."""
    for name in os.listdir(target):
        path = os.path.join(target, name)
        if re.fullmatch(r"\.init-[0-9a-f]{16}\.part", name) and path != work:
            with Journal(os.path.join(path, "journal")):  # raises if it is in use
                remove_folder(path)


# -- errors ------------------------------------------------------------------------------------------------------------


def _check_space(folder: str, needed: int) -> None:
    if needed > _free(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), folder)


def _free(folder: str) -> int:
    """The bytes that are free for this user."""
    folder = os.path.abspath(folder)
    while not is_folder(folder):
        folder = os.path.dirname(folder)
    if not hasattr(os, "statvfs"):
        return shutil.disk_usage(folder).free
    stats = os.statvfs(folder)
    return stats.f_bavail * stats.f_frsize


@contextmanager
def _explained(target: str, plan: list[_File]) -> Iterator[None]:
    """Convert errors of the operating system to a SaveError that says what to do."""
    try:
        yield
    except SaveError:
        raise
    except OSError as error:
        if not is_of_the_system(error):
            raise
        size = sum(file.size for file in plan)
        where = error.filename or target
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise SaveError(
                f"{target}: the weights take {size:,} bytes, and there is not enough space ({error.strerror}; "
                f"{_free(target):,} bytes are free). What has been written is kept: free some space and save again to "
                "resume; or remove the folder .init-*.part in it."
            ) from error
        raise SaveError(
            f"{where} cannot be written: {error.strerror or error} (while saving {size:,} bytes to {target})"
        ) from error
