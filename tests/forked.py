"""Python processes that start quickly: each is forked from one that has already imported PyTorch, JAX and Firstloss.

These imports take most of the time of a test that needs a separate process. The server only imports (no thread, no
device, no random number), and for each request forks a process in the state of a new one after its imports. Tests of
the import itself, or of a variable that is read at import, start their process with `subprocess`.

`start` and `run` replace `subprocess.Popen` and `subprocess.run` for `[sys.executable, *command]`. Each pytest process
has its own server, started by the first request, which ends with it; and another one that has imported everything but
JAX, for tests of what happens before JAX is imported (`jax=False`).
"""

from __future__ import annotations

import atexit
import functools
import gc
import json
import os
import random
import re
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_READ_BEFORE_JAX = ("PYTHONHASHSEED", "TORCH_")
_READ_AT_THE_IMPORT = ("JAX_", *_READ_BEFORE_JAX)
_LARGEST = 1 << 17  # bytes of a request


class Process:
    """The part of `subprocess.Popen` that the tests need."""

    def __init__(self, args: Sequence[str], pid: int, status: socket.socket, streams: Sequence[IO[str] | None]) -> None:
        self.args = args
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self._status = status

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end, and return its exit status."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                reply = self._status.recv(4)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            assert len(reply) == 4, "the server of processes has died"
            self.returncode = struct.unpack("i", reply)[0]
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Its exit status, or None while it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str | None, str | None]:
        """Wait for the process to end, and return its output."""
        outputs: list[str | None] = [None, None]

        def read(number: int, stream: IO[str]) -> None:
            with stream:
                outputs[number] = stream.read()

        streams = [(n, stream) for n, stream in enumerate((self.stdout, self.stderr)) if stream is not None]
        readers = [threading.Thread(target=read, args=each, daemon=True) for each in streams]
        for reader in readers:
            reader.start()
        end = None if timeout is None else time.monotonic() + timeout
        for reader in readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
        self.wait(None if end is None else max(0.01, end - time.monotonic()))
        return outputs[0], outputs[1]

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it is running."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    jax: bool = True,
) -> Process:
    """Start Python with the arguments `command`: ["-m", module, ...], ["-c", code, ...] or [script, ...].

    Args:
        env: its environment; None for this process's.
        cwd: its folder; None for this process's.
        stdin, stdout, stderr: `subprocess.PIPE` or `subprocess.DEVNULL`, an open file, or None for this process's; of
            `stderr` also `subprocess.STDOUT`.
        start_new_session: as `subprocess.Popen` has it.
        jax: whether JAX has been imported.
    """
    environment = dict(os.environ if env is None else env)
    server, known = _server(jax)
    read = _READ_AT_THE_IMPORT if jax else _READ_BEFORE_JAX
    for name in {**known, **environment}:
        if name.startswith(read) and known.get(name) != environment.get(name):
            raise ValueError(f"{name} is read when something is imported: start this process by subprocess.")
    opened: list[int] = []
    streams: list[IO[str] | None] = []
    for number, wanted in enumerate((stdin, stdout, stderr)):
        stream = None
        if wanted == subprocess.PIPE and number == 0:
            descriptor, end = os.pipe()
            stream = open(end, "w", encoding="utf-8")
        elif wanted == subprocess.PIPE:
            end, descriptor = os.pipe()
            stream = open(end, encoding="utf-8")
        elif wanted == subprocess.DEVNULL:
            descriptor = os.open(os.devnull, os.O_RDWR)
        elif wanted == subprocess.STDOUT:
            descriptor = os.dup(opened[1])
        else:
            descriptor = os.dup(number if wanted is None else wanted.fileno())
        opened.append(descriptor)
        streams.append(stream)
    status, child_status = socket.socketpair()
    request = {
        "command": [os.fspath(part) for part in command],
        "env": environment,
        "cwd": os.fspath(cwd or os.getcwd()),
        "session": start_new_session,
    }
    message = json.dumps(request).encode()
    assert len(message) < _LARGEST
    socket.send_fds(server, [message], [child_status.fileno(), *opened])
    for descriptor in opened:
        os.close(descriptor)
    child_status.close()
    reply = status.recv(4)
    assert len(reply) == 4, "the server of processes has died"
    return Process(command, struct.unpack("i", reply)[0], status, streams)


def run(
    command: Sequence[str],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with `text=True`; for `options` see `start`."""
    if capture_output:
        options = {**options, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = start(command, **options)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    assert process.returncode is not None
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), out, err)
    return subprocess.CompletedProcess(list(command), process.returncode, out, err)


def without_leaks(output: str) -> str:
    """A process's output without nanobind's leak reports about triton, which a CUDA build of torch imports."""
    return re.sub(r"nanobind: leaked .*refleaks\.html\n?", "", output, flags=re.DOTALL)


@functools.cache
def _server(jax: bool) -> tuple[socket.socket, dict[str, str]]:
    """The connection to the server, and the environment in which the server was started."""
    parent, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _LARGEST)
    environment = dict(os.environ)
    with child:
        path = os.pathsep.join([os.path.join(ROOT, "src"), ROOT])
        code = f"from tests import forked; forked.main({jax})"
        server = subprocess.Popen(
            [sys.executable, "-c", code, str(child.fileno())],
            env={**environment, "PYTHONPATH": path},
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def end() -> None:
        parent.close()
        server.wait()

    atexit.register(end)
    return parent, environment


# -- in the server ----------------------------------------------------------------------------------------------------


def import_all(jax: bool = True) -> None:
    """Import what nearly all processes import. None of it may start a thread or initialize a device."""
    import importlib

    if jax:
        importlib.import_module("jax")
    for name in ("torch.distributed.tensor", "numpy", "firstloss.trainer", "firstloss.runtime.compiled_model"):
        importlib.import_module(name)
    # The first step or the first optimizer would import these: a second per process.
    for name in ("torch._dynamo", "firstloss.runtime.step.compiling", "firstloss.runtime.step.cache"):
        importlib.import_module(name)
    import firstloss

    for name in ("backend", "compile", "trace", "deferred_init", "init_program", "save", "load", "shard"):
        getattr(firstloss, name)
    assert jax or "jax" not in sys.modules


def main(jax: bool) -> None:
    """Serve requests; in each forked process, run what was requested."""
    import_all(jax)
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # a child that collects the imported objects, at exit at the latest, would copy all of their pages
    base = list(sys.path)
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    if request is not None:
        _become(request, base)


def _serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the forked process, and None in the server when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by pytest
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, _LARGEST, 4)
        while _reaped():
            pass
        if not message:
            return None
        if not _fork():  # a process that waits for the requested one and reports its exit status
            requests.close()
            status, *streams = descriptors
            child = _fork()
            if not child:
                os.close(status)
                for number, descriptor in enumerate(streams):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                return json.loads(message)
            for descriptor in streams:
                os.close(descriptor)
            os.write(status, struct.pack("i", child))
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            try:
                os.write(status, struct.pack("i", ended))
            except BrokenPipeError:
                pass  # the client has gone away
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of JAX, whose threads would be missing in the child: none have started yet
        return os.fork()


def _reaped() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def _become(request: dict[str, Any], base: list[str]) -> None:
    """Turn this process into one that was started with the command."""
    if request["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    torch, numpy = sys.modules["torch"], sys.modules["numpy"]
    numpy.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    kind, *arguments = request["command"]
    where = os.path.dirname(os.path.abspath(kind)) if kind not in ("-m", "-c") else os.getcwd() if kind == "-m" else ""
    added = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:] = [where, *added, *(part for part in base[1:] if part not in added)]
    if kind == "-m":
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = [kind, *arguments]
        runpy.run_path(kind, run_name="__main__")
