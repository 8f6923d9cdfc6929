"""Compiled steps are found again by all that decides what they compute, and by nothing less."""

import contextlib
import json
import os
import sys

import jax
import pytest
import torch
from torch import nn

import firstloss as fl
from tests import forked

pytestmark = [pytest.mark.own_compile_cache, pytest.mark.optimized]

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Net(nn.Module):
    def __init__(self, constant=2.0, table=(1.0, 2.0, 3.0), width=3, dtype=torch.float32):
        super().__init__()
        self.fc = nn.Linear(4, width, dtype=dtype)
        self.constant = constant
        self.table = torch.tensor(table, dtype=dtype)

    def forward(self, x):
        return (self.fc(x.to(self.fc.weight.dtype)) * self.constant * self.table[: self.fc.out_features]).float()


def trained(backend, rate=0.1, decay=0.0, half=None, x=X, **model):
    """The losses of two steps of a model and a step that nothing remembers."""
    torch.manual_seed(0)
    net = Net(**model)
    compiled = fl.compile(net, backend)
    optimizer = torch.optim.SGD(net.parameters(), rate, weight_decay=decay)

    def step(x):
        region = torch.autocast("cpu", dtype=half) if half else contextlib.nullcontext()
        with region:
            loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = fl.trace(step) if backend.is_xla else step
    return [step(x).item() for _ in range(2)]


@pytest.fixture
def hits():
    """Counts how often a compiled step was found."""
    found = []

    def note(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            found.append(event)

    jax.monitoring.register_event_listener(note)
    yield found
    jax.monitoring.unregister_event_listener(note)


OTHERS = [
    {"constant": 3.0},
    {"constant": 2.0000002},
    {"width": 2},
    {"dtype": torch.float64},
    {"dtype": torch.bfloat16},
    {"decay": 0.1},
    {"decay": 0.2},
    {"half": torch.bfloat16},
    {"x": X[:1]},
]
SAME = [{}, {"rate": 0.2}, {"table": (3.0, 2.0, 1.0)}, {"x": X * 2}]  # other inputs, the same computation


def test_what_differs_is_compiled_and_what_does_not_is_found(tmp_path, hits):
    def on(**change):
        return trained(fl.backend("XLA", artifact_dir=tmp_path), **change)

    def close(ours, change):
        # float32 in another order, and half precision in which operations are rounded one by one or fused
        half = change.get("half") or change.get("dtype") is torch.bfloat16
        expected = trained(fl.backend("CPU"), **change)
        torch.testing.assert_close(ours, expected, rtol=2e-2 if half else 1e-5, atol=0)

    close(on(), {})
    for change in OTHERS:
        hits.clear()
        close(on(**change), change)
        assert not hits, change
    for change in SAME:
        hits.clear()
        close(on(**change), change)
        assert hits, change


def test_a_damaged_entry_is_compiled_anew(tmp_path):
    expected = trained(fl.backend("XLA", artifact_dir=tmp_path))
    for file in (tmp_path / "compiled").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    with pytest.warns(UserWarning, match="compilation cache"):
        assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected


def test_another_process_finds_it_unless_its_compiler_is_told_otherwise(tmp_path):
    code = (
        "import json, sys, jax, importlib.util\n"
        "hits = []\n"
        "jax.monitoring.register_event_listener(lambda e, **_: hits.append(e) if e.endswith('/cache_hits') else None)\n"
        f"spec = importlib.util.spec_from_file_location('cases', {__file__!r})\n"
        "cases = importlib.util.module_from_spec(spec); spec.loader.exec_module(cases)\n"
        f"losses = cases.trained(cases.fl.backend('XLA', artifact_dir={str(tmp_path)!r}))\n"
        "print(json.dumps([losses, len(hits)]))\n"
    )

    def process(**environment):
        inherited = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        done = forked.run(["-c", code], env={**inherited, **environment}, capture_output=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, none = process()
    again, found = process()
    assert again == first and none == 0 and found > 0
    assert process(XLA_FLAGS="--xla_cpu_max_isa=AVX")[1] == 0  # as on another machine
