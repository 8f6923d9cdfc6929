"""The first loss needs no JAX: weights are drawn into Firstloss's memory, which XLA takes over without a copy."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import firstloss as fl
from firstloss.lower import registry
from firstloss.lower.rules import RULES
from firstloss.runtime import jax_support, lazy_jax
from firstloss.runtime.device import host_weights, pages, placement
from firstloss.runtime.device.lazy_array import LazyArray
from tests import forked

ROOT = Path(__file__).parents[2]
WIDE = 1100  # a weight of WIDE x WIDE has its own pages
pytestmark = pytest.mark.skipif(not pages.ARE_AVAILABLE, reason="this system moves no pages, or there is no C compiler")

SCRIPT = f"""
import hashlib, json, sys, tempfile
way, mesh = sys.argv[1:]
import torch
from torch import nn
import firstloss as fl
backend = fl.backend("XLA", artifact_dir=tempfile.mkdtemp(), mesh=json.loads(mesh))
torch.manual_seed(0)
with backend.device:
    wide = [nn.Linear({WIDE}, {WIDE}) for _ in range(2)]
    net = nn.Sequential(*wide, nn.LayerNorm({WIDE}), nn.Dropout(0.1), nn.Linear({WIDE}, 3))
if way == "given":
    net.load_state_dict({{name: torch.full(value.shape, 0.1) for name, value in net.state_dict().items()}})
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
model = fl.compile(net, backend)
@fl.trace
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
from firstloss.runtime.step import first_loss
compute, there = first_loss.FirstLoss.compute, []
def noted(self, *given):
    results = compute(self, *given)
    there.append("jax" in sys.modules)
    return results
first_loss.FirstLoss.compute = noted
def batches():
    draws = torch.Generator().manual_seed(1)
    for _ in range(3):
        yield torch.randn(200, {WIDE}, generator=draws)
if way == "executor":
    loader = fl.utils.data.DataLoader(batches)
    losses = [step(x).item() for x in fl.utils.data.DataExecutor(loader, num_steps=3)]
else:
    losses = [step(x).item() for x in batches()]
from firstloss.runtime.device import pages
digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in net.state_dict().values())).hexdigest()
print(json.dumps([there, pages._moved, losses, digest]))
"""


def outcome(way, imported, mesh=None):
    """The result of a process that has imported JAX, or everything but JAX."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **(flags if mesh else {})}
    command = ["-c", SCRIPT, way, json.dumps(mesh)]
    done = forked.run(command, capture_output=True, env=environment, timeout=300, jax=imported == "jax")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def on_one_device():
    return outcome("loop", "nothing")


def test_a_process_has_its_first_loss_before_jax_is_imported_and_the_same_training():
    """Weights and losses, in a loop or an executor, are those of a process that imported JAX first."""
    imported, moved, *trained = outcome("loop", "jax")
    assert (imported, moved) == ([True], 0)
    # The two large weights and their optimizer's state are moved, which are made before JAX is imported as well.
    assert on_one_device() == outcome("executor", "nothing") == [[False], 6, *trained]


def test_a_mesh_of_one_process_has_its_first_loss_so_too():
    one, mesh = on_one_device(), {"fsdp": 4}
    imported, moved, *trained = outcome("loop", "jax", mesh)
    assert (imported, moved) == ([True], 0)
    assert trained[0][0] == one[2][0]  # PyTorch's kernels, from the same weights
    assert trained[0] == pytest.approx(one[2], rel=2e-5)  # sums are in another order: see mesh_cases.py
    for way in ("loop", "executor"):
        assert outcome(way, "nothing", mesh) == [[False], 0, *trained], way


AT_EXIT = """
import atexit, sys, threading
register, order = atexit.register, []
def noted(function, *given, **named):
    order.append(f"{function.__module__}.{function.__qualname__}")
    return register(function, *given, **named)
atexit.register = noted
answered = threading.Event()
class Slow:  # the import of JAX goes on until the first loss has been returned
    def find_spec(self, name, path=None, target=None):
        if name == "jax._src.api":
            assert answered.wait(100)
sys.meta_path.insert(0, Slow())
import torch
from torch import nn
import firstloss as fl
backend = fl.backend("XLA")
with backend.device:
    net = nn.Linear(4, 4)
model, optimizer = fl.compile(net, backend), torch.optim.SGD(net.parameters(), lr=0.1)
@fl.trace
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
loss = step(torch.ones(2, 4))
answered.set()
step(torch.ones(2, 4)).item()
ours, jax = order.index("firstloss.runtime.device.dispatch._finish"), order.index("jax._src.api.clean_up")
assert ours > jax, order  # what was registered last is called first
"""


def test_the_exit_waits_for_the_device_before_jax_ends_it_whenever_the_first_loss_is_there(tmp_path):
    """Also while JAX is being imported. Otherwise JAX would free what the device is still executing."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = ["-c", AT_EXIT]
    done = forked.run(command, capture_output=True, env=environment, timeout=300, jax=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_weights_that_were_given_go_to_a_mesh_that_jax_is_not_asked_for_yet():
    """PyTorch's kernels do not compute its first loss."""
    mesh = {"dp": 2, "fsdp": 2}
    imported, moved, *trained = outcome("given", "nothing", mesh)
    assert (imported, moved) == ([], 0)
    assert outcome("given", "jax", mesh)[2:] == trained


def test_the_list_of_rules_matches_the_table():
    own = {name for name in map(str, RULES) if name.startswith("firstloss")}  # registered when used
    own |= set(map(str, registry.OF_USERS))  # by other tests
    removed = {name for name in registry.listed() if not exists(name)}  # of the installed PyTorch
    assert (registry.listed() | own) - removed == set(map(str, RULES)), "write it anew: python -m firstloss.lower.rules"


def exists(overload):
    namespace, name, which = overload.split(".")
    return hasattr(getattr(getattr(torch.ops, namespace), name, None), which)


# -- with JAX imported, but treated as missing when the weights are drawn --


@pytest.fixture
def before_jax(monkeypatch):
    monkeypatch.setattr(placement, "is_imported", lambda: False)


def trained(tmp_path, before=lambda net: None, after=lambda net, held: None):
    """Losses and weights of three steps."""
    backend = fl.backend("XLA", artifact_dir=tmp_path)
    torch.manual_seed(0)
    with backend.device:
        net = nn.Sequential(nn.Linear(WIDE, WIDE), nn.LayerNorm(WIDE), nn.Linear(WIDE, 3))
        net.register_buffer("turned", torch.empty(WIDE, WIDE).t().uniform_())
    model, optimizer = fl.compile(net, backend), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    held = before(net)

    @fl.trace
    def step(x):
        loss = model(x @ net.turned).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    losses = [step(torch.full((4, WIDE), 0.01)).item() for _ in range(3)]
    after(net, held)
    return losses, {name: value.detach().clone() for name, value in net.state_dict().items()}


def read(net):
    return net[0].weight.sum().item()


def hold_an_array(net):
    return net[0].weight.detach().numpy()


def shows_the_weight(net, array):
    assert (array == net[0].weight.detach().numpy()).all()


def edit(net):
    with torch.no_grad():
        net[0].weight.mul_(0.5)


@pytest.mark.parametrize(
    ("before", "after"),
    [(lambda net: None, None), (read, None), (hold_an_array, shows_the_weight), (edit, None)],
    ids=["nothing", "read", "held", "edited"],
)
def test_weights_drawn_before_jax_train_the_same(before, after, tmp_path, monkeypatch):
    after = after or (lambda net, held: None)
    expected, weights = trained(tmp_path, before, after)
    drawn, make = [], host_weights.materialize
    with monkeypatch.context() as context:
        context.setattr(placement, "is_imported", lambda: False)
        context.setattr(host_weights, "materialize", lambda *args: drawn.append(make(*args)) or drawn[-1])
        losses, same = trained(tmp_path, before, after)
    assert losses == expected
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    # It really was the other way. Whether pages were moved depends on earlier deallocations in this process: if the C
    # library has room for an array in its heap, it does not map new pages.
    assert drawn


def host_weight(value_shape, before_jax):
    backend = fl.backend("XLA")
    torch.manual_seed(0)
    with backend.device:
        weight = torch.empty(value_shape).uniform_()
    value = weight._storage.value
    return host_weights.materialize([value], ())[value]


def test_pages_become_an_xla_array_and_are_donated(backend, before_jax):
    import jax

    lazy = host_weight((WIDE, WIDE), before_jax)
    expected = lazy.borrow().clone()
    array = lazy.wait()
    assert lazy.borrow() is None and lazy.wait() is array
    assert torch.equal(jax_support.to_host(array), expected)
    address = array.unsafe_buffer_pointer()
    donated = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert array.is_deleted() and donated.unsafe_buffer_pointer() == address
    assert torch.equal(jax_support.to_host(donated), expected + 1)


def test_memory_in_use_is_not_moved(backend, before_jax):
    lazy = host_weight((WIDE, WIDE), before_jax)
    held, moved = lazy.borrow(), pages._moved
    array = lazy.wait()
    assert pages._moved == moved
    assert torch.equal(jax_support.to_host(array), held)
    assert array.unsafe_buffer_pointer() != held.data_ptr()


def test_unaligned_pages_are_copied(backend):
    own = pages.Pages((WIDE, WIDE), torch.float32)
    own.tensor.fill_(3)
    memory = torch.zeros(WIDE * WIDE + 4096)
    shift = (own.tensor.data_ptr() - memory.data_ptr()) % 4096 // 4 + 16
    assert not own.move(memory[shift : shift + WIDE * WIDE])
    assert own.tensor.eq(3).all() and not memory.any()


def test_memory_is_unmapped_with_its_last_tensor():
    def mapped(address):
        with open("/proc/self/maps") as maps:
            spans = (line.split(" ", 1)[0].split("-") for line in maps)
            return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)

    own = pages.Pages((64 << 20,), torch.uint8)
    tensor, address = own.tensor, own.tensor.data_ptr()
    del own
    assert mapped(address)
    del tensor
    assert not mapped(address)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cuda,cpu"}, False),
        ({"TPU_LIBRARY_PATH": "x"}, False),
    ],
    ids=["no plugin", "asked for the CPU", "asked for another", "a TPU's library"],
)
def test_whether_the_device_is_known_without_jax(environment, expected, monkeypatch):
    for name in ("JAX_PLATFORMS", "TPU_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert lazy_jax.is_cpu_only.__wrapped__() == expected


def test_a_plugin_makes_the_device_unknown(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(lazy_jax.importlib.metadata, "entry_points", lambda group: [group])
    assert not lazy_jax.is_cpu_only.__wrapped__()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 1),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, 8),
        ({"XLA_FLAGS": "--a=b --xla_force_host_platform_device_count=8 --xla_force_host_platform_device_count=2"}, 2),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "4"}, 4),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_NUM_CPU_DEVICES": "-1"}, 8),
        ({"XLA_FLAGS": "flags.txt"}, 0),
        ({"JAX_NUM_CPU_DEVICES": "many"}, 0),
    ],
    ids=["nothing", "a flag", "the last flag", "JAX's own", "none of JAX's own", "a file", "no number"],
)
def test_the_number_of_devices_is_known_without_jax(environment, expected, monkeypatch):
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert lazy_jax.cpu_devices() == expected


def test_jax_agrees_on_how_many_devices_there_are():
    script = """
from firstloss.runtime import lazy_jax
import jax
print(lazy_jax.cpu_devices(), len(jax.devices()))
"""
    flags = "--xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=5"
    for more in ({"JAX_NUM_CPU_DEVICES": "2"}, {"JAX_NUM_CPU_DEVICES": "-1"}):
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "XLA_FLAGS": flags, **more}
        done = forked.run(["-c", script], capture_output=True, env=environment, jax=False)
        predicted, count = done.stdout.split()
        assert predicted == count, more


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        (None, True),
        ({"fsdp": 4, "tp": 2}, True),
        ({"fsdp": 16}, False),
        ({"fsdp": "8"}, False),
        ("fsdp", False),
    ],
    ids=["none", "as many as there are", "too many", "no sizes", "no mesh"],
)
def test_jax_is_deferred_on_suitable_meshes(mesh, expected, monkeypatch):
    monkeypatch.setattr(lazy_jax, "is_imported", lambda: False)
    monkeypatch.setattr(lazy_jax, "is_cpu_only", lambda: True)
    monkeypatch.setattr(lazy_jax, "cpu_devices", lambda: 8)
    assert lazy_jax.can_defer_import(mesh) == expected


def test_an_operation_without_a_rule_runs_by_its_kernel_from_the_first_call_on(tmp_path):
    """Also if nothing has been lowered yet."""
    script = f"""
import torch
import firstloss as fl
backend = fl.backend("XLA", artifact_dir={str(tmp_path)!r})
with backend.device:
    net = torch.nn.Linear(4, 4)
model = fl.compile(net, backend)
@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2
twice.register_fake(torch.empty_like)
@fl.trace
def step(x):
    loss = model(x).sum()
    return loss, twice(loss.detach())
for _ in range(3):
    loss, doubled = step(torch.ones(2, 4))
    print((doubled == 2 * net(torch.ones(2, 4)).sum()).item())
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = forked.run(["-c", script], capture_output=True, env=environment, timeout=300, jax=False)
    assert done.stdout.split() == ["True"] * 3, (done.stdout, done.stderr)
    assert done.stderr.count("no lowering to StableHLO: mine.twice.default") == 1, done.stderr


def test_results_stay_on_the_host_until_needed_as_arrays():
    lazy = LazyArray(lambda: None, torch.ones(3))
    assert lazy.is_ready() and not lazy.is_deleted() and lazy.block_until_ready() is lazy
    assert torch.equal(lazy.borrow(), torch.ones(3))
