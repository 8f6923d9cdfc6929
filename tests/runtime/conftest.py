"""A backend for each test, with an artifact folder of its own."""

import pytest

import firstloss as fl
from firstloss.runtime.executable import Executable


@pytest.fixture
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)


@pytest.fixture
def traced(monkeypatch):
    """A list with one item for each trace: how often a step's Python has run, whatever it counts itself."""
    found = []
    init = Executable.__init__

    def counted(self, *args, **kwargs):
        found.append(1)
        init(self, *args, **kwargs)

    monkeypatch.setattr(Executable, "__init__", counted)
    return found
