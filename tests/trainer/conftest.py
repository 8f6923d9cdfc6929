"""Run the same tests on all backends of this machine."""

import pytest

import firstloss as fl


@pytest.fixture(params=["XLA", "CPU"])
def backend(request, tmp_path):
    return fl.backend(request.param, artifact_dir=tmp_path / "artifacts")
