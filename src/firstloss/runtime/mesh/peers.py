"""Coordination of processes that run the same steps: they agree on each step, and one compiles for all.

They exchange messages through the key-value store of JAX's coordination service.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import sys
import threading
from typing import Any

import jax
import numpy as np

from ... import processor
from ...compat.jax_names import distributed_client, forget_distributed_service
from ...errors import BackendError, ProcessLostError
from ...files import atomic_write

_PATIENCE = 60  # seconds after which a process reports what it waits for
_PIECE = 1 << 20  # bytes of a value: the service limits messages
_steps = itertools.count()


class Peers:
    """The processes of a step, including this one.

    Each process creates one of these for each step that it compiles, in the program's order, so a step has the same
    number in all processes.
    """

    def __init__(self, client: Any, index: int, count: int) -> None:
        self._client = client
        self._index = index
        self._count = count
        self._step = f"firstloss/step{next(_steps)}"

    def agree(self, name: str, digest: str) -> None:
        """Wait until all processes have reached this step, and check that it is the same in all.

        Raises:
            BackendError: in every process, if it is not.
        """
        client, folder = self._client, f"{self._step}/same"
        client.key_value_set(f"{folder}/{self._index}", f"{name} {digest}")
        if client.key_value_increment(f"{self._step}/come", 1) == self._count:
            client.key_value_set(f"{self._step}/all", "")
        self._wait(f"{self._step}/all", name)
        entries = {int(key.rsplit("/", 1)[1]): text.split() for key, text in client.key_value_dir_get(folder)}
        differing = {number: text for number, text in sorted(entries.items()) if text != entries[0]}
        if differing:
            number, (other, _) = next(iter(differing.items()))
            reference = entries[0][0]
            raise BackendError(
                f"process {self._index} of {self._count}: the processes do not run the same program: process 0 has "
                f"reached the step {reference}, and process {number} has "
                + (other if other != reference else "other operations, shapes or numbers in it")
                + (f" (and {len(differing) - 1} more differ)" if len(differing) > 1 else "")
                + ". All processes must run the same step: the same code and numbers in it, and batches of the same "
                "shapes and dtypes. Do not call a step in only one of them (for a log or an evaluation)."
            )

    def compile(self, number: int, name: str, lowered: Any, options: dict[str, Any], devices: Any) -> Any:
        """Return the executable of function `number` of the step. Process 0 compiles it, or reads it from the folder of
        compiled executables, and sends it to the others.

        Raises:
            BackendError: if process 0 has lowered another computation.
        """
        client, key = self._client, f"{self._step}/function{number}"
        text = _digest(lowered)
        if self._index == 0:
            pieces: list[bytes] = []
            try:
                compiled, packed = _compiled(lowered, options, devices, text)
                pieces = [packed[i : i + _PIECE] for i in range(0, len(packed), _PIECE)]
            finally:  # empty on failure: the others then compile and report it themselves
                for n, piece in enumerate(pieces):
                    client.key_value_set_bytes(f"{key}/{n}", piece)
                client.key_value_set(f"{key}/is", f"{len(pieces)} {text}")
            return compiled
        count, other_text = self._wait(f"{key}/is", f"{name}, which process 0 compiles").split()
        if other_text != text:
            raise BackendError(
                f"process {self._index} of {self._count}: {name} has the same operations and shapes as in process 0, "
                "but other constants. What differs between processes (the rows that each reads) belongs in a batch "
                "made with firstloss.distributed.global_batch."
            )
        packed = b"".join(
            client.blocking_key_value_get_bytes(f"{key}/{n}", 1000 * _PATIENCE) for n in range(int(count))
        )
        if client.key_value_increment(f"{self._step}/taken{number}", 1) == self._count - 1:
            client.key_value_delete(key)
        return _unpacked(packed, lowered, devices) if packed else lowered.compile(options)

    def _wait(self, key: str, what: str) -> str:
        """Wait for the value of `key`. If a process dies, JAX ends those that wait."""
        for turn in itertools.count(1):
            try:
                return self._client.blocking_key_value_get(key, 1000 * _PATIENCE)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise explain_loss(error) from error
                sys.stderr.write(
                    f"firstloss: process {self._index} of {self._count} has waited {turn * _PATIENCE} s for {what}\n"
                )
                sys.stderr.flush()
        raise AssertionError


def peers_of(mesh: Any) -> Peers | None:
    """The processes that run steps on a `jax.sharding.Mesh`; None if only this one does, or the others are unknown."""
    client = distributed_client() if jax.process_count() > 1 else None
    if client is None:
        return None
    process_indices = {device.process_index for device in mesh.devices.flat}
    return (
        Peers(client, jax.process_index(), len(process_indices))
        if len(process_indices) == jax.process_count()
        else None
    )


def _compiled(lowered: Any, options: dict[str, Any], devices: np.ndarray, text: str) -> tuple[Any, bytes]:
    """The executable, and its serialized form for the other processes, which is cached in the compilation cache folder.

    JAX's own cache files cannot be shared by processes: on a CPU another process looks for another name, and what was
    read from such a file cannot be serialized again.
    """
    device_ids = [(device.id, device.process_index, device.device_kind) for device in devices.flat]
    compiler = jax.__version__, devices.flat[0].client.platform_version, os.environ.get("XLA_FLAGS")
    name = hashlib.sha256(repr((text, options, device_ids, compiler, processor.instructions())).encode()).hexdigest()
    folder = jax.config.jax_compilation_cache_dir
    path = os.path.join(folder or os.devnull, f"{name}.processes")  # without a folder, no file
    with contextlib.suppress(Exception), open(path, "rb") as file:  # recompile if there is no valid file
        packed = file.read()
        return _unpacked(packed, lowered, devices), packed
    _count_reads()
    _reads.count = 0
    compiled = lowered.compile(options)
    packed = b"" if _reads.count else _packed(compiled)
    if packed:
        with contextlib.suppress(OSError), atomic_write(path) as file:
            file.write(packed)
    return compiled, packed


def compile_for_others(lowered: Any, options: dict[str, Any], devices: np.ndarray) -> None:
    """Compile into the compilation cache folder, unless it is there."""
    _compiled(lowered, options, devices, _digest(lowered))


def _digest(lowered: Any) -> str:
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


class _Reads(threading.local):
    """The number of executables that this thread has read from JAX's cache."""

    count = 0


_reads = _Reads()


@functools.cache
def _count_reads() -> None:
    """Make `_reads` count, from the first call on."""

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            _reads.count += 1

    jax.monitoring.register_event_listener(note)


def _packed(compiled: Any) -> bytes:
    from jax.experimental import serialize_executable

    try:
        return serialize_executable.serialize(compiled)[0]
    except (ValueError, NotImplementedError, TypeError, AttributeError, RuntimeError, pickle.PicklingError):
        return b""  # not supported by this backend: each process compiles


def _unpacked(packed: bytes, lowered: Any, devices: np.ndarray) -> Any:
    from jax.experimental import serialize_executable

    return serialize_executable.deserialize_and_load(
        packed, lowered.in_tree, lowered.out_tree, execution_devices=tuple(devices.flat)
    )


# Parts of the messages of JAX, Gloo and NCCL when a peer is gone.
_GONE = ("Connection reset", "Connection closed", "Broken pipe", "Connection refused", "unhealthy", "heartbeat", "NCCL")


def explain_loss(error: BaseException) -> BaseException:
    """`error`, or a ProcessLostError if it means that another process is gone. This process then exits without waiting
    for it."""
    if jax.process_count() == 1 or not any(words in str(error) for words in _GONE):
        return error
    atexit.unregister(forget_distributed_service)
    atexit.register(forget_distributed_service)  # runs before JAX's own, which are registered earlier
    return ProcessLostError(
        f"process {jax.process_index()} of {jax.process_count()}: another process has ended or can no longer be "
        "reached, so this one cannot go on. See that process's last messages for the reason. Restart all processes; "
        "firstloss.load resumes from the last checkpoint."
    )
