"""Compiled steps are cached by everything that determines their computation, and by nothing else."""

import contextlib
import hashlib
import json
import os
import pickle
import struct
import sys

import jax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import firstloss as fl
from firstloss.lower import aten
from firstloss.runtime.step import executable_cache, functions
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
    """The losses of two steps of a new model and step."""
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
def hits(monkeypatch):
    """A list of cache hits, in JAX's cache or in Firstloss's."""
    sources, load = [], executable_cache.Entry.load

    def note(event, **_):
        if event == "/jax/compilation_cache/cache_hits":
            sources.append("JAX's")

    def loaded(entry):
        compiled = load(entry)
        if compiled is not None:
            sources.append("Firstloss's")
        return compiled

    monkeypatch.setattr(executable_cache.Entry, "load", loaded)
    jax.monitoring.register_event_listener(note)
    yield sources
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


def test_equal_steps_are_found_and_others_compiled(tmp_path, hits):
    def on(**change):
        return trained(fl.backend("XLA", artifact_dir=tmp_path), **change)

    def close(losses, change):
        # float32 in another order, and half precision in which operations may be fused before rounding
        half = change.get("half") or change.get("dtype") is torch.bfloat16
        expected = trained(fl.backend("CPU"), **change)
        torch.testing.assert_close(losses, expected, rtol=2e-2 if half else 1e-5, atol=0)

    close(on(), {})
    for change in OTHERS:
        hits.clear()
        close(on(**change), change)
        assert not hits, change
    for change in SAME:
        hits.clear()
        close(on(**change), change)
        assert set(hits) == {"Firstloss's"}, change  # nothing is lowered, so JAX's cache is not read


def test_a_damaged_entry_is_recompiled(tmp_path):
    expected = trained(fl.backend("XLA", artifact_dir=tmp_path))
    for file in (tmp_path / "compiled").iterdir():
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    for file in (tmp_path / "lowered").glob("*.executable"):
        file.unlink()
    with pytest.warns(UserWarning, match="compilation cache"):
        assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected


def halved(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def emptied(file):
    file.write_bytes(b"")


def of_something_else(file):
    content = pickle.dumps(("not", "a", "function"))
    file.write_bytes(hashlib.sha256(content).digest() + content)


def writable_by_others(file):
    file.chmod(0o666)


@pytest.mark.parametrize("damage", [halved, emptied, of_something_else, writable_by_others])
def test_an_untrusted_executable_is_recompiled(damage, tmp_path, hits):
    expected = trained(fl.backend("XLA", artifact_dir=tmp_path))
    files = sorted((tmp_path / "lowered").glob("*.executable"))
    assert files
    for file in files:
        damage(file)
    for file in (tmp_path / "compiled").iterdir():  # an executable that XLA loaded from its cache cannot be stored
        file.unlink()
    assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected
    assert "Firstloss's" not in hits
    assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected  # it has been rewritten
    assert "Firstloss's" in hits


def test_executables_from_jaxs_cache_are_not_stored(tmp_path, hits):
    """XLA would serialize it without its kernels."""
    expected = trained(fl.backend("XLA", artifact_dir=tmp_path))
    for file in (tmp_path / "lowered").glob("*.executable"):
        file.unlink()
    for _ in range(2):
        hits.clear()
        assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected
        assert set(hits) == {"JAX's"}


LIBRARIES = """
import json, sys, torch
import firstloss as fl
from firstloss.runtime.step import executable_cache
loaded, load = [], executable_cache.Entry.load
executable_cache.Entry.load = lambda entry: loaded.append(1) or load(entry)
backend = fl.backend("XLA", artifact_dir=sys.argv[1], first_loss="compiled")
@fl.trace
def step(m):
    factors = torch.linalg.cholesky(m), torch.linalg.qr(m)[1], torch.linalg.eigvalsh(m), torch.linalg.svdvals(m)
    return sum(each.sum() for each in (*factors, torch.linalg.solve(m, m), torch.fft.rfft(m).abs(), m.topk(2)[0]))
@fl.trace
def plain(m):
    return (m @ m).exp().sum()
m = torch.eye(4) + 0.1
print(json.dumps([step(m).item(), plain(m).item(), len(loaded)]))
"""


def test_functions_that_call_a_library_are_lowered_in_each_process(tmp_path):
    """JAX initializes LAPACK when it lowers a call: otherwise the call would crash."""

    def process():
        done = forked.run(["-c", LIBRARIES, str(tmp_path)], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    *first, none = process()
    *again, cache_hits = process()
    assert again == first and (none, cache_hits) == (0, 1)  # `plain`


def test_a_second_start_lowers_nothing(tmp_path, monkeypatch):
    expected = trained(fl.backend("XLA", artifact_dir=tmp_path))
    monkeypatch.setattr(functions, "lower_function", lambda *_: pytest.fail("lowered"))
    assert trained(fl.backend("XLA", artifact_dir=tmp_path)) == expected


def test_registered_lowerings_are_lowered_at_each_start(tmp_path, hits):
    """Its lowering may be another function then."""

    @torch.library.custom_op("firstloss_compile_cache::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x  # never run

    @scaled.register_fake
    def _(x):
        return torch.empty_like(x)

    results = []
    for factor in (2, 3):
        fl.register_lowering(torch.ops.firstloss_compile_cache.scaled, replace=True)(
            lambda x, factor=factor: factor * x
        )
        with fl.backend("XLA", artifact_dir=tmp_path).device:
            pass
        step = fl.trace(lambda x: torch.ops.firstloss_compile_cache.scaled(x).sum())
        results.append(step(torch.ones(3)).item())
    assert results == [6, 9]


# Steps that differ in one thing each, usually a constant.
FAMILY = {
    "add": lambda x, y: x + y,
    "the other order": lambda x, y: y + x,
    "one argument twice": lambda x, y: x + x,
    "subtract": lambda x, y: x - y,
    "alpha": lambda x, y: torch.add(x, y, alpha=2),
    "another alpha": lambda x, y: torch.add(x, y, alpha=3),
    "a whole number": lambda x, y: x * 1 + y,
    "a float": lambda x, y: x * 1.5 + y,
    "the next float": lambda x, y: x * 1.5000000000000002 + y.double(),
    "double": lambda x, y: x * 1.5 + y.double(),
    "true": lambda x, y: x + y * True,
    "zero": lambda x, y: torch.copysign(x, torch.tensor(0.0)) + y,
    "minus zero": lambda x, y: torch.copysign(x, torch.tensor(-0.0)) + y,
    "rows": lambda x, y: (x + y).sum(0),
    "columns": lambda x, y: (x + y).sum(1),
    "kept dimension": lambda x, y: (x + y).sum(1, keepdim=True),
    "transposed": lambda x, y: x.t() + y,
    "both transposed": lambda x, y: (x.t() + y.t()).contiguous(),
    "a slice": lambda x, y: x[1:] + y[1:],
    "another slice": lambda x, y: x[:-1] + y[1:],
    "every second": lambda x, y: x[::2] + y[::2],
    "table": lambda x, y: x + torch.tensor(2.0) * y,
    "another table": lambda x, y: x + torch.tensor(3.0) * y,
    "two results": lambda x, y: (x + y, x - y),
    "two results, turned round": lambda x, y: (x - y, x + y),
    "one of two": lambda x, y: ((x + y).exp(), x + y)[0],
    "the other of two": lambda x, y: ((x + y).exp(), x + y)[1],
    "eps": lambda x, y: nn.functional.layer_norm(x + y, (4,), eps=1e-5),
    "another eps": lambda x, y: nn.functional.layer_norm(x + y, (4,), eps=1e-2),
    "half": lambda x, y: x.bfloat16() + y,
    "both half": lambda x, y: x.bfloat16() + y.bfloat16(),
    "in place": lambda x, y: x.clone().add_(y).mul_(2),
    "in place, of a part": lambda x, y: (z := x.clone(), z[0].add_(y[0]), z)[2],
    "in place, of another part": lambda x, y: (z := x.clone(), z[1].add_(y[1]), z)[2],
    "view as another dtype": lambda x, y: (x + y).view(torch.int32),
}


# Like the first one, but with its arguments in reverse order and an unused result.
THE_SAME = {"the other order", "the other of two"}


def test_steps_that_differ_in_one_thing_do_not_share_entries(tmp_path, hits):
    """All of them in one folder, twice: the second time each finds its own entry."""
    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    for again in (False, True):
        for name, function in FAMILY.items():
            hits.clear()
            with fl.backend("XLA", artifact_dir=tmp_path).device:
                pass

            def step(x, y, function=function):
                return function(x, y)

            actual, expected = fl.trace(step)(x, y), function(x, y)
            for traced, eager in zip(*[r if isinstance(r, tuple) else (r,) for r in (actual, expected)], strict=True):
                # float32, other kernels. Measured: 7e-7 of an element, 5e-7 absolutely.
                torch.testing.assert_close(traced.detach().cpu(), eager, rtol=5e-6, atol=1e-6)
            if again:
                assert hits, name
            else:  # two signatures may be one module to JAX
                assert ("Firstloss's" in hits) is (name in THE_SAME), name
    assert len(list((tmp_path / "lowered").glob("*.executable"))) > 0.9 * (len(FAMILY) - len(THE_SAME))


def entry(signature, order=(), name="step_0"):
    cached = executable_cache.entry_of(name, executable_cache.describe(signature), order)
    return None if cached is None else cached.path.name


PARTS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text(max_size=2)
    | st.binary(max_size=2)
    | st.sampled_from([torch.float32, torch.float64, torch.device("cpu"), float, bool]),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


def exact(part):
    """A component by its type and its bits."""
    if type(part) is tuple:
        return tuple, tuple(map(exact, part))
    return type(part), struct.pack("d", part) if type(part) is float else part


@given(PARTS, PARTS)
@settings(deadline=None)
def test_keys_depend_on_the_signature(a, b):
    """Equal but not identical constants have different keys, and so do tuples with another nesting."""
    fl.backend("XLA")
    assert (entry(a) == entry(b)) is (exact(a) == exact(b))
    assert entry((a, b)) != entry(((a, b),))


def test_keys_depend_on_the_machine_and_settings(tmp_path, monkeypatch):
    fl.backend("XLA", artifact_dir=tmp_path)
    keys = {entry((1,)), entry((1,), name="step_1"), entry((1,), order=(2,))}
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_max_isa=AVX")
    keys.add(entry((1,)))
    with jax.default_matmul_precision("bfloat16"):
        keys.add(entry((1,)))
    with torch.backends.mkldnn.flags(enabled=False):
        keys.add(entry((1,)))
    assert len(keys) == 5 + aten.registered_with_xla()  # without PyTorch's kernels the last setting has no effect
    assert entry((object(),)) is None and entry(([1],)) is None  # cannot be serialized completely


def test_another_process_with_the_same_flags_finds_it(tmp_path):
    code = (
        "import json, sys, jax, importlib.util\n"
        "hits = []\n"
        "from firstloss.runtime.step import executable_cache as executables\n"
        "load = executables.Entry.load\n"
        "executables.Entry.load = lambda entry: hits.append(1) or load(entry)\n"
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
    again, cache_hits = process()
    assert again == first and none == 0 and cache_hits > 0
    assert process(XLA_FLAGS="--xla_cpu_max_isa=AVX")[1] == 0  # as on another machine
    # Where JAX has several devices, what is loaded runs on one of them, as what was compiled did.
    code = code.replace("hits = []", "hits = []; jax.config.update('jax_num_cpu_devices', 8)")
    several = [process() for _ in range(2)]
    assert several == [[first, 0], [first, cache_hits]]
