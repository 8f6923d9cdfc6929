"""A backend for each test, with an artifact folder of its own."""

import pytest

import firstloss as fl


@pytest.fixture
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)
