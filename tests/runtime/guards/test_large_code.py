"""What a step reads is guarded, however much code can be reached; and reaching it runs none of it."""

import importlib
import sys

import pytest
import torch

import firstloss as fl
from firstloss.runtime.guards.guards import TableGuard
from firstloss.runtime.step.cache_entries import CacheEntry

X = torch.ones(2)

# A repository that is no installed package: each module refers to all others, and to classes that refer to all of it.
MODULE = """
import repo
from typing import Any
{imports}

SETTINGS = {{"scale": 2.0}}
OTHERS = [{others}]


class Base:
    scale = 1.0
    peer: Any = None

    def forward(self, x):
        return x * self.scale

    def export(self, path, registry=SETTINGS, peers=OTHERS):
        return [other.Base().forward(path) for other in OTHERS]


class Model(Base):
    scale = 3.0
    build = staticmethod(lambda name=Base: getattr(repo, name))


def helper(x, kind=Model):
    return x + 1


def train(x):
    return helper(Model().forward(x))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Writes a repository of some modules and imports it; returns its first module."""

    def write(size):
        for name in [name for name in sys.modules if name.partition(".")[0] == "repo"]:
            monkeypatch.delitem(sys.modules, name)
        folder = tmp_path / str(size) / "repo"
        folder.mkdir(parents=True)
        names = [f"m{i}" for i in range(size)]
        for i, name in enumerate(names):
            before = names[:i]  # no circular imports
            imports = "\n".join(f"import repo.{other}" for other in before)
            others = ", ".join(f"repo.{other}" for other in before)
            (folder / f"{name}.py").write_text(MODULE.format(imports=imports, others=others))
        (folder / "__init__.py").write_text("")
        monkeypatch.syspath_prepend(str(folder.parent))
        importlib.invalidate_caches()
        return importlib.import_module(f"repo.m{size - 1}")

    return write


@pytest.fixture
def entries(monkeypatch):
    """Those of the cache that are made in a test."""
    made = []
    create = CacheEntry.__init__

    def recorded(self, *args):
        create(self, *args)
        made.append(self)

    monkeypatch.setattr(CacheEntry, "__init__", recorded)
    return made


def guarded(entry):
    """The number of names and objects that a compiled step guards."""
    guards = entry.guards._guards
    return len(guards), sum(len(guard.expected) for guard in guards if isinstance(guard, TableGuard))


def test_guards_do_not_grow_with_the_code_that_can_be_reached(backend, repository, entries):
    counts = []
    for size in (50, 80, 160):  # the first also warms up: PyTorch runs more the first time
        module = repository(size)

        @fl.trace
        def step(x, module=module):
            return module.train(x)

        assert [step(X).tolist() for _ in range(3)] == [[4.0, 4.0]] * 3
        counts.append([guarded(entry) for entry in entries])
        entries.clear()
    assert counts[1] == counts[2]


def replaced_method(module, monkeypatch):
    monkeypatch.setattr(module.Base, "forward", lambda self, x: x * 10)
    return 11.0


def replaced_attribute(module, monkeypatch):
    monkeypatch.setattr(module.Model, "scale", 5.0)
    return 6.0


def an_attribute_that_was_absent(module, monkeypatch):
    monkeypatch.setattr(module.Model, "forward", lambda self, x: x * 7, raising=False)
    return 8.0


def replaced_code(module, monkeypatch):
    monkeypatch.setattr(module.helper, "__code__", (lambda x, kind=None: x + 100).__code__)
    return 103.0


def replaced_function(module, monkeypatch):
    monkeypatch.setattr(module, "train", lambda x: x + 1)
    return 2.0


CHANGES = (replaced_method, replaced_attribute, an_attribute_that_was_absent, replaced_code, replaced_function)


@pytest.mark.parametrize("size", [1, 80])  # where less and more is reached than what is recorded at once
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::firstloss.errors.GraphChangeWarning")
def test_a_change_in_a_large_repository_is_noticed(change, size, backend, repository, monkeypatch):
    module = repository(size)

    @fl.trace
    def step(x):
        return module.train(x)

    assert [step(X)[0].item() for _ in range(3)] == [4.0] * 3
    expected = change(module, monkeypatch)
    assert [step(X)[0].item() for _ in range(2)] == [expected] * 2


class Refuses(dict):
    """As a registry that imports what it names when it is looked at."""

    def __bool__(self):
        raise AssertionError("a guard has run the user's code")

    __len__ = __iter__ = keys = values = items = __getitem__ = __bool__


class RefusesToo(list):
    __bool__ = __len__ = __iter__ = __getitem__ = Refuses.__bool__


REGISTRIES = [Refuses(a=1), RefusesToo([1, 2])]


def test_guards_run_no_methods_of_containers(backend):
    @fl.trace
    def step(x):
        return x * 2 if REGISTRIES[0] is not REGISTRIES[1] else x

    assert [step(X)[0].item() for _ in range(3)] == [2.0] * 3
