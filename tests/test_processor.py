"""The processor's description, on Linux and where there is none."""

import platform
from pathlib import Path

import pytest

from firstloss import processor


@pytest.fixture(autouse=True)
def read_anew():
    processor.fields.cache_clear()
    yield
    processor.fields.cache_clear()


INTEL = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: A: B\nflags\t\t: fpu avx2\n\nflags\t: x\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU part\t: 0xd0c\n"


@pytest.mark.parametrize("text, name, instructions", [(INTEL, "A: B", "fpu avx2"), (ARM, "0xd0c", "fp asimd")])
def test_it_is_that_of_the_first_core(text, name, instructions, monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda self, **_: text)
    assert (processor.name(), processor.instructions()) == (name, instructions)


def test_there_may_be_no_description(monkeypatch):
    def missing(self, **_):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert (processor.fields(), processor.name(), processor.instructions()) == ({}, "unknown", "")
