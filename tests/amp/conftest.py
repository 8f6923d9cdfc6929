"""A backend for each test, with its own artifact folder."""

import pytest

import firstloss as fl


@pytest.fixture
def backend(tmp_path):
    return fl.backend("XLA", artifact_dir=tmp_path)
