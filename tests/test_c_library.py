"""Parts in C that are missing are named once, with what it costs."""

import shutil
import warnings
from pathlib import Path

import pytest

from firstloss import c_library
from firstloss.errors import MissingKernelsWarning
from firstloss.rng import native


@pytest.fixture(autouse=True)
def not_warned(monkeypatch):
    monkeypatch.setattr(c_library, "_has_warned", False)


def test_a_part_that_was_not_built_is_named_once(tmp_path):
    with pytest.warns(MissingKernelsWarning, match=r"without its parts in C \(_x: it was not built\).*install one"):
        assert c_library.load(str(tmp_path / "module.py"), "_x", {}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c_library.load(str(tmp_path / "module.py"), "_y", {}) is None


def test_a_part_for_another_machine_is_named(tmp_path):
    (tmp_path / f"_x{c_library.SUFFIX}").write_bytes(b"\x7fELF of another machine")
    with pytest.warns(MissingKernelsWarning, match="_x: .*_x.*: "):
        assert c_library.load(str(tmp_path / "module.py"), "_x", {}) is None


@pytest.mark.skipif(native._library is None, reason="there are no compiled parts here")
def test_a_part_that_lacks_a_function_is_named(tmp_path):
    shutil.copy(Path(native.__file__).with_name("_fill.so"), tmp_path)
    with pytest.warns(MissingKernelsWarning, match="firstloss_no_such_function"):
        assert c_library.load(str(tmp_path / "module.py"), "_fill", {"firstloss_no_such_function": (None, ())}) is None
