"""Processes that share compiled functions, simulated by threads with a shared key-value store."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from firstloss.errors import BackendError, ProcessLostError
from firstloss.runtime.mesh import peers
from firstloss.runtime.mesh.peers import Peers


class Client:
    """Stands for JAX's coordination service."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    key_value_set_bytes = key_value_set

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: ")
            return self.values[key]

    blocking_key_value_get_bytes = blocking_key_value_get

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.values.items() if key.startswith(folder + "/")]

    def key_value_increment(self, key, by):
        with self.changed:
            self.values[key] = self.values.get(key, 0) + by
            return self.values[key]

    def key_value_delete(self, folder):
        for key in [key for key in self.values if key.startswith(folder + "/")]:
            del self.values[key]


@pytest.fixture
def compiled(monkeypatch):
    """The number of compilations."""
    threads, compile_one = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda *args: threads.append(threading.get_ident()) or compile_one(*args)
    )
    return threads


@pytest.fixture
def folder(tmp_path):
    """Without JAX's own cache: a function read from it cannot be serialized, so each process compiles."""
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_enable_compilation_cache", before[1])
    compilation_cache.reset_cache()


def together(count, run):
    """The results or errors of `run(peers)` in each of `count` processes."""
    client = Client()
    everyone = []
    for index in range(count):
        everyone.append(Peers(client, index, count))
        everyone[-1]._step = "step"
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index, peer) for index, peer in enumerate(everyone)]
        return [future.exception() or future.result() for future in futures], client


def compile_together(count, factor=lambda index: 2.0):
    def run(index, peer):
        lowered = jax.jit(lambda x: x * factor(index)).lower(jnp.ones(3))
        return peer.compile(0, "double", lowered, {}, np.array(jax.devices()[:1]))

    return together(count, run)


@pytest.mark.parametrize("count", [2, 5])
def test_one_process_compiles_and_a_later_start_reads(count, compiled, folder):
    executables, client = compile_together(count)
    assert [executable(jnp.ones(3)).tolist() for executable in executables] == [[2.0] * 3] * count
    # entries are removed when all have read them
    assert len(compiled) == 1 and not client.key_value_dir_get("step/function0")
    again, _ = compile_together(count)
    assert [executable(jnp.ones(3)).tolist() for executable in again] == [[2.0] * 3] * count
    assert len(compiled) == 1


def test_large_executables_are_sent_in_pieces(compiled, folder, monkeypatch):
    monkeypatch.setattr(peers, "_PIECE", 100)
    executables, _ = compile_together(2)
    assert executables[1](jnp.ones(3)).tolist() == [2.0] * 3 and len(compiled) == 1


def test_a_damaged_file_is_recompiled(compiled, folder):
    compile_together(2)
    (file,) = folder.glob("*.processes")
    whole = file.read_bytes()
    for content in (b"", b"something else", whole[: len(whole) // 2]):
        file.write_bytes(content)
        compiled.clear()
        executables, _ = compile_together(2)
        assert [executable(jnp.ones(3)).tolist() for executable in executables] == [[2.0] * 3] * 2
        compile_together(2)
        assert len(compiled) == 1 and len(file.read_bytes()) > len(whole) // 2


def test_unserializable_executables_are_compiled_by_each(compiled, folder, monkeypatch):
    monkeypatch.setattr(peers, "_packed", lambda compiled: b"")
    executables, _ = compile_together(3)
    assert [executable(jnp.ones(3)).tolist() for executable in executables] == [[2.0] * 3] * 3
    assert len(compiled) == 3


def test_executables_from_jaxs_cache_are_compiled_by_each(compiled, folder, monkeypatch):
    """XLA cannot serialize it again on a CPU: it would lack its functions."""
    compile_one = jax.stages.Lowered.compile

    def read(*args):
        jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        return compile_one(*args)

    monkeypatch.setattr(jax.stages.Lowered, "compile", read)
    executables, _ = compile_together(2)
    assert [executable(jnp.ones(3)).tolist() for executable in executables] == [[2.0] * 3] * 2
    assert len(compiled) == 2 and not list(folder.iterdir())


def test_a_compile_error_is_raised_in_each_process(folder, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    assert [str(error) for error in compile_together(3)[0]] == ["no such thing"] * 3


def test_different_constants_are_an_error(folder):
    executables, _ = compile_together(3, lambda index: 2.0 + (index == 2))
    assert executables[1](jnp.ones(3)).tolist() == [2.0] * 3
    assert isinstance(executables[2], BackendError) and "process 2 of 3: double has the same operations" in str(
        executables[2]
    )


@pytest.mark.parametrize("names, digests", [("aab", "111"), ("aaa", "121"), ("aba", "213")])
def test_all_processes_learn_which_one_differs(names, digests):
    errors, _ = together(3, lambda index, peer: peer.agree(names[index], digests[index]))
    sent = list(zip(names, digests, strict=True))
    other = next(index for index in range(3) if sent[index] != sent[0])
    more = sum(pair != sent[0] for pair in sent) - 1
    for index, error in enumerate(errors):
        assert isinstance(error, BackendError) and f"process {index} of 3: the processes do not run" in str(error)
        assert f"reached the step {names[0]}, and process {other} has " in str(error)
        assert ("1 more differ" in str(error)) == (more == 1)


def test_waiting_processes_say_so(monkeypatch, capsys):
    monkeypatch.setattr(peers, "_PATIENCE", 0.1)
    go = threading.Event()

    def run(index, peer):
        if index == 1:
            go.wait(0.35)
        peer.agree("training", "1")

    assert together(2, run)[0] == [None, None]
    assert "firstloss: process 0 of 2 has waited 0.2 s for training\n" in capsys.readouterr().err


GONE = [
    "Gloo all-reduce failed: Read error [::1]:3: Connection reset by peer",
    "Connection closed by peer",
    "NCCL error",
]


@pytest.mark.parametrize("words", [*GONE, "RESOURCE_EXHAUSTED: Out of memory"])
def test_errors_of_a_lost_process_are_recognized(words, monkeypatch):
    error = jax.errors.JaxRuntimeError(words)
    assert peers.explain_loss(error) is error  # for this process only
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert isinstance(peers.explain_loss(error), ProcessLostError) == (words in GONE)
