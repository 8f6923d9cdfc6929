"""The same tests on the backends that this machine has."""

import pytest

import firstloss as fl


@pytest.fixture(params=["XLA", "CPU"])
def backend(request, tmp_path):
    return fl.backend(request.param, artifact_dir=tmp_path / "artifacts")
