"""Meshes, in processes with eight devices: the cases are in mesh_cases.py and others."""

import json
import os
import signal
import socket
from pathlib import Path
from subprocess import PIPE

import pytest

import firstloss as fl
from tests import forked, scale


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", ["mesh_cases.py", "deep_cases.py", "plan_cases.py", "same_run_cases.py"])
def test_cases_with_eight_devices_pass(cases, request):
    cases = os.path.join(os.path.dirname(__file__), cases)
    without = [part for plugin in ("cacheprovider", "unraisableexception") for part in ("-p", f"no:{plugin}")]
    done = forked.run(
        ["-m", "pytest", "-qx", *without, "-m", request.config.option.markexpr, cases],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def start(folder, port, rank, script="mesh_ranks.py", *more):
    here = os.path.join(os.path.dirname(__file__), script)
    return forked.start([here, str(folder), str(port), str(rank), *map(str, more)], stdout=PIPE, stderr=PIPE)


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def result(process):
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def test_steps_of_two_processes_read_values(tmp_path):
    """Numbers that are kept, computed with, and branched on are compiled; with other values the step is traced at each
    call, and what is left is compiled for their shapes."""
    port = free_port()
    ranks = [start(tmp_path, port, rank, "reads_ranks.py") for rank in range(2)]
    results = [result(process) for process in ranks]
    eager = result(start(tmp_path, 0, 0, "reads_ranks.py"))
    compiled = {"plain": 1, "keep": 1, "branch": 2, "clip": 1, "element": 1, "rate": 1, "nan": 2, "seldom": 1}
    computed_each_time = {"mask", "listed", "sized", "masked", "unique", "written", "array", "search", "hooked"}
    compiled |= dict.fromkeys(computed_each_time, 0)
    for mine in results:
        assert [got["error"] for got in mine.values()] == [None] * len(compiled)
        for name, count in compiled.items():
            got, expected = mine[name], eager[name]
            assert got["compiled"] == count
            for key in ("losses", "kept", "numbers", "weights"):
                # Sums are in another order on a mesh: see mesh_cases.py.
                assert got[key] == pytest.approx(expected[key], rel=2e-4, nan_ok=True), (name, key)


def test_two_processes_match_one(tmp_path):
    port = free_port()
    ranks = [start(tmp_path, port, rank) for rank in range(2)]
    results = [result(process) for process in ranks]
    one = result(start(tmp_path, 0, 0))
    for mine in results:
        # Sums are in another order on a mesh: see mesh_cases.py.
        assert mine["losses"] + mine["further"] == pytest.approx(one["losses"], rel=2e-5)
        assert mine["resumed"] == mine["further"]
        assert mine["shards"] == [[64, 32]] * 2
        assert "other processes hold parts of this tensor of shape [128, 64]" in mine["error"]
        assert mine["gathered"] == pytest.approx(one["sum"], rel=1e-3)  # weights after five steps, whose sum is near 0
        assert mine["again"] == ["again"]
    assert results[0]["losses"] == results[1]["losses"] and results[0]["gathered"] == results[1]["gathered"]
    # The checkpoint of two processes loads in this one.
    weights = fl.load(tmp_path / "it")["again"]
    assert weights["up.weight"].double().sum().item() == results[0]["gathered"]
    assert len(list((tmp_path / "it").glob("tensors-*.safetensors"))) == 2


@pytest.mark.timeout(600)
def test_processes_with_their_own_loaders_match_one(tmp_path):
    """Each reads its own rows from its loader's position: together they train like one process with all rows."""
    port, count = free_port(), scale.of(2, 4)
    ranks = [start(tmp_path, port, rank, "loader_ranks.py", count) for rank in range(count)]
    results = [result(process) for process in ranks]
    one = result(start(tmp_path, 0, 0, "loader_ranks.py", count))
    assert all(mine == results[0] for mine in results)
    # Sums are in another order on a mesh: see mesh_cases.py. The second numbers are sums of the batches, near 0.
    flat = [[number for pair in losses for number in pair] for losses in (results[0]["losses"], one["losses"])]
    assert flat[0] == pytest.approx(flat[1], rel=2e-5, abs=1e-4)
    assert results[0]["resumed"] == results[0]["losses"][7:]
    assert results[0]["whole"] == results[0]["losses"]


@pytest.mark.timeout(600)
def test_a_deep_model_resumes_with_other_counts_of_processes_and_devices(tmp_path):
    """Two processes save, four continue and save, two continue; one process with 8 devices saves, 4 and 16 continue.
    Identical layers are one function, compiled by one process for all."""

    def together(count, devices, source, begin, save_at):
        port, options = free_port(), (count, devices, source, begin, save_at)
        ranks = [start(tmp_path, port, rank, "deep_ranks.py", *options) for rank in range(count)]
        return [result(process) for process in ranks]

    two = together(2, 2, "new", 0, 3)
    four = together(4, 1, "by 2 at 3", 3, 4)
    again = together(2, 2, "by 4 at 4", 4, 5)
    alone = result(start(tmp_path, 0, 0, "deep_ranks.py", 2, 16, "by 2 at 3", 0, 3))
    expected = alone.pop("one")
    resumed = {"2": (two, 0), "4, of 2": (four, 3), "2, of 4": (again, 4)}
    for name, (ranks, begin) in resumed.items():
        assert all(mine["losses"] == ranks[0]["losses"] for mine in ranks), name
        alone[name] = [None] * begin + ranks[0]["losses"]
        assert all(mine["calls"] > mine["functions"] for mine in ranks), name
        assert [mine["compiled"] for mine in ranks[1:]] == [0] * (len(ranks) - 1), name
    assert two[0]["compiled"] == two[0]["functions"] and four[0]["compiled"] == four[0]["functions"]
    assert again[0]["compiled"] == 0  # as saved by two processes
    for name, losses in alone.items():  # and norms of gradients
        for reference, mine in zip(reversed(expected), reversed(losses), strict=False):
            # Sums are in another order on a mesh. Measured: up to 1e-6.
            assert mine is None or mine == pytest.approx(reference, rel=1e-5), name


@pytest.mark.timeout(600)
def test_a_run_goes_on_with_fewer_processes_as_if_nothing_had_happened(tmp_path):
    """Of four processes one is killed in the middle of a step; two go on from the last checkpoint, with executables
    that had been compiled ahead, and then one with eight devices: the same bits as of one device that never stopped."""

    def together(count, devices, begin, end, *killed):
        port = free_port()
        return [
            start(tmp_path, port, rank, "same_run_ranks.py", count, devices, begin, end, *killed)
            for rank in range(count)
        ]

    ranks = together(4, 1, 0, 8, 3)
    messages = [process.communicate(timeout=280)[1] for process in ranks]
    assert ranks[-1].returncode == -signal.SIGKILL
    for process, message in zip(ranks[:-1], messages, strict=False):
        assert process.returncode in (1, -signal.SIGABRT), message[-2000:]
    assert any("ProcessLostError: process" in message for message in messages)
    assert not (tmp_path / "4").exists()
    two = [result(process) for process in together(2, 1, 2, 4)]
    assert two[0] == two[1] and two[0]["compiled"] == 0
    (eight,) = map(result, together(1, 8, 4, 6))
    (one,) = map(result, together(1, 1, 0, 6))
    assert one["losses"][2:] == two[0]["losses"] + eight["losses"]
    assert one["digest"] == eight["digest"]
