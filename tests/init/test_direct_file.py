"""Files for direct I/O."""

import os
import threading

import pytest
import torch

from firstloss.init.disk.direct_file import BLOCK, DirectFile, aligned


def test_a_write_that_goes_on_after_close_goes_to_no_other_file(tmp_path, monkeypatch):
    """As when the caller is interrupted while it waits for its threads, and saves again."""
    write, begun, closed = os.pwrite, threading.Event(), threading.Event()

    def slow(*args):
        begun.set()
        assert closed.wait(10)
        return write(*args)

    data = aligned(BLOCK).fill_(7)
    file = DirectFile(str(tmp_path / "first"))
    monkeypatch.setattr(os, "pwrite", slow)
    thread = threading.Thread(target=file.write, args=(data, 0))
    thread.start()
    assert begun.wait(10)
    file.close()
    monkeypatch.undo()
    with open(tmp_path / "second", "w+b") as other:  # would get the number of the closed file
        closed.set()
        thread.join()
        assert other.read() == b""
    assert (tmp_path / "first").read_bytes() == bytes(data.numpy())
    with pytest.raises(ValueError, match="first is closed"):
        file.write(data, 0)


def test_blocks_are_written_where_they_belong(tmp_path):
    file = DirectFile(str(tmp_path / "it"))
    for number in (2, 0, 1):
        file.write(aligned(BLOCK).fill_(number), number * BLOCK)
    file.end_at(2 * BLOCK + 5)
    file.close()
    content = torch.frombuffer(bytearray((tmp_path / "it").read_bytes()), dtype=torch.uint8)
    assert torch.equal(content, torch.arange(3, dtype=torch.uint8).repeat_interleave(BLOCK)[: 2 * BLOCK + 5])
