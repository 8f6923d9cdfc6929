"""Atomic file writes, and queries of files."""

import os
import stat
from pathlib import Path

import pytest

import firstloss
from firstloss.files import atomic_write, exists, is_folder, sync_folder


def test_the_file_appears_when_the_block_ends(tmp_path):
    with atomic_write(tmp_path / "a", "w") as file:
        file.write("ü")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_bytes() == "ü".encode()
    assert os.listdir(tmp_path) == ["a"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(KeyError), atomic_write(tmp_path / "a") as file:
        file.write(b"new")
        raise KeyError
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_target_that_is_a_folder_leaves_nothing_behind(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError), atomic_write(tmp_path / "a") as file:
        file.write(b"new")
    assert os.listdir(tmp_path) == ["a"]


def test_permissions_are_those_of_a_new_file(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    with atomic_write(tmp_path / "aside") as file:
        file.write(b"")
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "aside")}
    assert len(modes) == 1


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_write(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"


def test_queries(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    paths = (tmp_path, tmp_path / "file", tmp_path / "missing", tmp_path / "file" / "in a file", "\0")
    assert [exists(path) for path in paths] == [True, True, False, False, False]
    assert [is_folder(path) for path in paths] == [True, False, False, False, False]


@pytest.mark.parametrize("query", [exists, is_folder, sync_folder])
def test_an_error_that_a_signals_handler_raises_is_no_answer(query, tmp_path, monkeypatch):
    """TimeoutError is an OSError, which `os.path.exists` takes for "no"."""

    def interrupted(*args):
        raise TimeoutError("too late")

    monkeypatch.setattr(os, "stat", interrupted)
    monkeypatch.setattr(os, "open", interrupted)
    with pytest.raises(TimeoutError, match="too late"):
        query(str(tmp_path))


@pytest.mark.parametrize("room", ["init", "runtime/checkpoint", "trainer"])
def test_what_reads_and_writes_files_asks_so(room):
    for path in (Path(firstloss.__file__).parent / room).rglob("*.py"):
        text = path.read_text()
        assert not any(name in text for name in ("os.path.exists", "os.path.isdir", "shutil.rmtree")), path
