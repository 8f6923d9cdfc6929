"""The benchmarks' harness, and one benchmark on a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.__main__ import FIGURES

pytest.importorskip("rich")


# Helper modules, and the benchmarks that need a GPU, which `make gpu` runs.
HELPERS = {
    "__init__",
    "__main__",
    "harness",
    "zoo",
    "models",
    "ranks",
    "flax_llama",
    "flax_models",
    "flax_scan",
    "jax_llama",
}


def test_make_bench_runs_all_benchmarks():
    names = {path.stem for path in Path(harness.ROOT, "benchmarks").glob("*.py")} - HELPERS
    assert set(FIGURES) == names and len(FIGURES) == len(names)


# They reach into the runtime, whose changes have broken them unnoticed.
INSIDE = {"guards", "traced_loop", "trainer_overhead"}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name", [name if name in INSIDE else pytest.param(name, marks=pytest.mark.sweep) for name in FIGURES]
)
def test_each_benchmark_runs(name):
    command = [sys.executable, "-m", "benchmarks", "--tiny", "--rounds", "1", "--only", name]
    done = subprocess.run(command, cwd=harness.ROOT, env={**os.environ, "PYTHONPATH": "src"}, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def test_sides_are_interleaved():
    order = []
    runs = harness.interleaved(("a", "b"), 2, lambda side: order.append(side) or {"seconds": len(order)})
    assert order == ["a", "b", "a", "b"]
    assert harness.middle(runs["a"], "seconds") == 2 and harness.middle(runs["b"], "seconds") == 3


def test_the_ratio_is_taken_round_by_round():
    slow, fast = [[{"seconds": s} for s in seconds] for seconds in ([10, 40, 30], [5, 10, 10])]
    assert harness.ratio(slow, fast, "seconds") == 3


def test_bandwidth_is_in_bytes_per_second():
    bandwidth = harness.write_bandwidth(1 << 24)
    assert bandwidth["fresh"] > 1e6 and bandwidth["touched"] > 1e6


def test_reports_are_printed_as_text_and_json(capsys):
    figure = harness.Figure("capture", "under 1 s", [("capture", "2.00 s")], False, {"runs": []})
    harness.report([figure], as_json=False)
    assert "not met" in capsys.readouterr().out
    harness.report([figure], as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["rows"] == [["capture", "2.00 s"]]


def test_a_missing_device_is_reported_in_one_line():
    code = "from benchmarks import gpu_llama_8b as b, harness; harness.main(b)"
    environment = {**os.environ, "PYTHONPATH": "src", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=harness.ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == harness.NOT_MEASURED, done.stderr
    assert "not measured: JAX finds no GPU here" in done.stdout and done.stdout.count("\n") == 1


@pytest.mark.sweep
def test_the_gpu_benchmark_runs_tiny_on_a_cpu():
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.gpu_llama_8b", "--tiny", "--rounds", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=harness.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (figure,) = json.loads(done.stdout)
    assert figure["met"]  # the eager policy gives the CPU's weights
    rows = dict(figure["rows"])
    assert {
        "rng='eager': faster than eager construction on the GPU",
        "rng='counter': capture, compile and draw",
    } <= set(rows)


def test_one_benchmark_runs_end_to_end():
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "benchmarks.materialize_llama_1b", "--tiny", "--rounds", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(command, cwd=harness.ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (figure,) = json.loads(done.stdout)
    assert ["bit-identical, generator too", "yes"] in figure["rows"]
