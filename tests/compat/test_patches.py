"""Patches of PyTorch: none on import, all listed in the table, all removed when a capture ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import firstloss as fl
from firstloss.capture import deferred as _deferred  # noqa: F401 - registers its replacements
from firstloss.compat import patches
from firstloss.compat.names import lookup
from firstloss.errors import CompatibilityError
from firstloss.interpreter import Undo
from firstloss.runtime.step import optimizers as _optimizers  # noqa: F401 - likewise

ROOT = Path(__file__).parents[2]
# Everything assignable in PyTorch and JAX, by name.
CENSUS = """
import sys, types, importlib

def census():
    attributes = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("torch", "jax", "jaxlib", "numpy") or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
                attributes[name, attribute] = value
            if isinstance(value, type) and value.__module__.split(".")[0] == name.split(".")[0]:
                for inner, member in list(vars(value).items()):
                    if callable(member) or isinstance(member, (staticmethod, classmethod, property)):
                        attributes[value.__module__, value.__qualname__, inner] = member
    return attributes

def changed(before, after):
    replacements = {key: getattr(after[key], "__func__", after[key]) for key in after.keys() - before.keys()}
    new = {key for key, function in replacements.items() if "/firstloss/" in str(getattr(function, "__code__", ""))}
    return sorted(".".join(key) for key in new | {key for key in before if after.get(key) is not before[key]})
"""


def run(code: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", CENSUS + code], capture_output=True, text=True, cwd=ROOT / "src", timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


BEFORE_AND_AFTER = """
import pkgutil, torch, jax, torch._dynamo, torch.distributed.tensor, torch.utils.checkpoint, torch.optim.swa_utils
import torch.distributed.checkpoint
from torch._higher_order_ops import cond, scan, while_loop
before = census()
import firstloss as fl
skip = {"firstloss.__main__"}
for module in pkgutil.walk_packages(fl.__path__, "firstloss."):
    if module.name not in skip:
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass
imported = census()
print(*changed(before, imported))
from firstloss.capture.step import StepTrace
before = imported
with fl.deferred():
    layer = torch.nn.Linear(2, 2)
    layer.weight.detach()
    inside = census()
tracing = StepTrace()
with tracing.active():
    traced = census()
after = census()
for then in (inside, traced, after):
    print(*changed(before, then))
"""


@pytest.fixture(scope="module")
def replaced() -> list[set[str]]:
    """The attributes replaced by importing the whole package; then by a capture and a step, and those left replaced
    afterwards."""
    return [set(line.split()) for line in run(BEFORE_AND_AFTER)]


def test_importing_firstloss_patches_nothing(replaced):
    """With every module imported, after the libraries that they use."""
    assert replaced[0] == set()


def test_everything_that_a_capture_or_step_patches_is_in_the_table(replaced):
    """Patches for captures are removed when the capture ends."""
    inside, traced, after = replaced[1:]
    allowed = {
        when: {place for name, row in patches.PATCHES.items() if row.when == when for place in places(name)}
        for when in (patches.DEFERRED, patches.CAPTURE, patches.TRACE, patches.IMPORTED)
    }
    stays = allowed[patches.DEFERRED] | allowed[patches.IMPORTED]
    assert after <= stays
    assert inside <= stays | allowed[patches.CAPTURE]
    assert traced <= stays | allowed[patches.CAPTURE] | allowed[patches.TRACE]
    assert "torch.Tensor.__new__" in after
    assert "torch.Tensor.__deepcopy__" in inside - after
    assert "torch.tensor" in traced - after


def places(name: str) -> set[str]:
    """The names under which the census finds what a row replaces."""
    names = set()
    for place in (name, *patches.PATCHES[name].also):
        path, _, attribute = place.rpartition(".")
        try:
            owner = lookup(path)
        except (AttributeError, ModuleNotFoundError):  # only in another version, or in a library that is not here
            continue
        names.add(f"{owner.__module__}.{owner.__qualname__}.{attribute}" if isinstance(owner, type) else place)
    return names


@pytest.mark.parametrize("name", patches.PATCHES)
def test_a_row_has_what_it_replaces_and_a_reason(name):
    patch = patches.PATCHES[name]
    assert patch.why and patch.when in {patches.DEFERRED, patches.CAPTURE, patches.TRACE, patches.IMPORTED}
    if not patch.optional:
        lookup(name)
    for place in patch.also:
        assert lookup(place).__name__ == lookup(name).__name__


class Place:
    """Stands for a class of PyTorch."""

    def method(self, x):
        return x + 1


@pytest.fixture
def row(monkeypatch):
    """A row for `Place.method`, with a replacement."""
    name = f"{__name__}.Place.method"
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or sys.modules[Place.__module__])
    monkeypatch.setitem(patches.PATCHES, name, patches.Patch(patches.CAPTURE, "a reason"))
    patches.replaces(name)(lambda original, self, x: original(self, x) * 10)
    yield name
    del patches._replacements[name]


def test_a_patch_ends_with_its_last_user(row):
    patches.enter(patches.CAPTURE, "a")
    patches.enter(patches.CAPTURE, "b")
    patches.leave(patches.CAPTURE, "a")
    patches.leave(patches.CAPTURE, "a")  # as an interrupted block does
    assert Place().method(1) == 20
    patches.leave(patches.CAPTURE, "b")
    assert Place().method(1) == 2 and Place.method.__name__ == "method"


def test_a_replacement_by_other_code_stays(row, monkeypatch):
    patches.enter(patches.CAPTURE, "a")
    replacement = Place.method
    monkeypatch.setattr(Place, "method", lambda self, x: replacement(self, x) + 100)
    patches.leave(patches.CAPTURE, "a")
    assert Place().method(1) == 120
    patches.enter(patches.CAPTURE, "a")
    patches.leave(patches.CAPTURE, "a")
    assert Place().method(1) == 120


def test_a_missing_function_is_an_error_that_names_it(row, monkeypatch):
    monkeypatch.delattr(Place, "method")
    with pytest.raises(CompatibilityError, match=r"has no \S*Place.method, .* must replace \(a reason\)"):
        patches.enter(patches.CAPTURE, "a")
    assert "a" not in patches._holders[patches.CAPTURE]


def test_a_patch_lasts_until_the_block_ends():
    before = torch.amp.GradScaler.scale
    with Undo() as undo, undo:
        patches.swap(undo, "torch.amp.GradScaler.scale", None)
        assert torch.amp.GradScaler.scale is None
    assert torch.amp.GradScaler.scale is before


def test_concurrent_captures_keep_patches_until_the_last_ends():
    """Patches of one thread's capture stay while another thread's capture needs them."""
    ready, go = threading.Event(), threading.Event()

    def other():
        with fl.deferred():
            ready.set()
            go.wait(60)
            torch.nn.Linear(2, 2)

    thread = threading.Thread(target=other)
    with fl.deferred():
        thread.start()
        ready.wait(60)
    assert patches.is_installed("torch.random.get_rng_state")
    go.set()
    thread.join()
    assert not patches.is_installed("torch.random.get_rng_state")
