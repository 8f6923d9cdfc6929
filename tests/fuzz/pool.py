"""Check programs in worker processes, which may crash or hang."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from .. import forked
from .outcome import CRASHED, HUNG, Outcome

ROOT = Path(__file__).resolve().parents[2]
_RENEWED_AFTER = 150  # programs per worker: compiled code is never freed, so a worker's memory grows


class Worker:
    """A process that checks programs of one kind, one at a time."""

    def __init__(self, kind: str, seconds: float = 120) -> None:
        self._kind = kind
        self._seconds = seconds
        self._process: forked.Process | None = None
        self._errors = tempfile.TemporaryFile()  # the process's output when it crashes
        self._checked = 0

    def check(self, source: str) -> Outcome:
        """The outcome of `source`; the process is restarted if necessary."""
        return self.ask(source)[1]

    def ask(self, request: str | int) -> tuple[str, Outcome]:
        """A given program or that of a seed, and its outcome.

        Programs are generated in the process too, since generation runs their statements, which may crash PyTorch.
        """
        if self._checked >= _RENEWED_AFTER:
            self.close()
        if self._process is None:
            self._process = self._start()
            self._checked = 0
        self._checked += 1
        process = self._process
        hung = threading.Event()

        def stop() -> None:
            hung.set()
            process.kill()

        timer = threading.Timer(self._seconds, stop)
        timer.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            program, answer = process.stdout.readline(), process.stdout.readline()
        except OSError:
            program = answer = ""
        finally:
            timer.cancel()
        if not answer:
            status = process.wait()
            self._process = None
            if not program:
                return "", Outcome("discarded", f"PyTorch ended the process, with status {status}, while it was made")
            if hung.is_set():
                return json.loads(program), Outcome(HUNG, f"no end within {self._seconds:g} s")
            return json.loads(program), Outcome(
                CRASHED, f"the process ended with status {status}: {self._last_words()}"
            )
        return json.loads(program), Outcome(**json.loads(answer))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None

    def _last_words(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 20_000))
        lines = self._errors.read().decode(errors="replace").splitlines()
        return " | ".join(lines[-60:])

    def _start(self) -> forked.Process:
        flags = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
        environment = {**os.environ, "XLA_FLAGS": flags.strip(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")])
        command = ["-m", "tests.fuzz.pool", self._kind]
        self._errors.seek(0)  # where the process starts writing
        self._errors.truncate()
        return forked.start(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            cwd=ROOT,
        )


def check_all(kind: str, seeds: Iterable[int], jobs: int) -> Iterator[tuple]:
    """`(seed, source, Outcome)` of each seed's program, as they finish."""
    todo: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for seed in seeds:
        todo.put(seed)

    def work() -> None:
        worker = Worker(kind)
        try:
            while True:
                try:
                    seed = todo.get_nowait()
                except queue.Empty:
                    return
                done.put((seed, *worker.ask(seed)))
        except BaseException as error:
            done.put(error)
        finally:
            worker.close()
            done.put(None)

    for _ in range(jobs):
        threading.Thread(target=work, daemon=True).start()
    running = jobs
    while running:
        item = done.get()
        if item is None:
            running -= 1
        elif isinstance(item, BaseException):
            raise item
        else:
            yield item


def _serve(kind: str) -> None:
    """Read programs from standard input and write verdicts to standard output, which is hidden from the programs."""
    faulthandler.enable()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = importlib.import_module(f"tests.fuzz.{kind}")
    if kind == "steps":
        from .interpret import instead_of_compiling

        instead_of_compiling()
    gc.freeze()  # exclude all existing objects from garbage collection
    for line in sys.stdin:
        request = json.loads(line)
        source = module.generate(request) if isinstance(request, int) else request
        answers.write(json.dumps(source) + "\n")
        answers.flush()
        try:
            outcome = module.check(source)
        except Exception as error:  # of the checker itself
            outcome = Outcome("foreign", f"{type(error).__name__} of the checker: {error}"[:300])
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()
        gc.freeze()  # caches filled by a program are not


if __name__ == "__main__":
    _serve(sys.argv[1])
