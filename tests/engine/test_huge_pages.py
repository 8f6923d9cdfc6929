"""Huge pages are requested where the system hands them out fast, and small ones otherwise."""

import ctypes
import mmap
import re
import sys

import pytest
import torch

from firstloss.engine import huge_pages
from firstloss.engine.huge_pages import advise_huge

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="madvise with MADV_HUGEPAGE is Linux's")


class System:
    """Records what is requested of the system; which huge pages are fast is given by their numbers."""

    def __init__(self, monkeypatch, base=0, fast=lambda number: True):
        self.advice, self.touched = [], []
        monkeypatch.setattr(huge_pages, "_to_skip", 0)
        monkeypatch.setattr(huge_pages, "_madvise", self._madvise)
        monkeypatch.setattr(huge_pages, "_is_fast", self._is_fast)
        self._base, self._fast = base, fast

    def _madvise(self, address, size, advice):
        self.advice.append(((address - self._base) // MIB, size // MIB, advice == mmap.MADV_HUGEPAGE))
        return 0

    def _is_fast(self, address):
        self.touched.append((address - self._base) // MIB)
        return self._fast(self.touched[-1])


def test_each_piece_of_64_mib_is_tried_by_its_first_page(monkeypatch):
    system = System(monkeypatch)
    advise_huge([(0, 150 * MIB)])
    assert system.touched == [0, 64, 128]
    assert system.advice == [(0, 64, True), (64, 64, True), (128, 22, True)]


def test_after_a_slow_page_the_next_256_mib_get_small_ones(monkeypatch):
    system = System(monkeypatch, fast=lambda number: number != 64)
    advise_huge([(0, 640 * MIB)])
    assert system.touched == [0, 64, 384, 448, 512, 576]
    small = [(at, 64, False) for at in (64, 128, 192, 256, 320)]
    assert system.advice == [(0, 64, True), (64, 64, True), *small, *((at, 64, True) for at in (384, 448, 512, 576))]


def test_that_memory_is_counted_over_several_requests(monkeypatch):
    system = System(monkeypatch, fast=lambda number: False)
    for number in range(8):
        advise_huge([(number * 1024 * MIB, 64 * MIB)])
    assert system.touched == [0, 5 * 1024]


def test_a_range_that_must_have_pages_of_one_kind_is_tried_once(monkeypatch):
    system = System(monkeypatch, fast=lambda number: False)
    advise_huge([(0, 200 * MIB)], piece=200 * MIB)
    assert system.advice == [(0, 200, True), (0, 200, False)]


@pytest.mark.parametrize("fast", [True, False])
def test_the_advice_reaches_the_system(fast, monkeypatch):
    if not re.search(r"\[(always|madvise)\]", open("/sys/kernel/mm/transparent_hugepage/enabled").read()):
        pytest.skip("this system has no huge pages for who asks")
    monkeypatch.setattr(huge_pages, "_to_skip", 0)
    monkeypatch.setattr(huge_pages, "_SLOW_SECONDS", 10.0 if fast else 0.0)
    with mmap.mmap(-1, 20 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * 1).from_buffer(memory)
        address = ctypes.addressof(view)
        advise_huge([(address, 20 * MIB)])
        flags = flags_at(-(-address // (2 * MIB)) * 2 * MIB)
        assert memory[:] == bytes(20 * MIB)
        del view
    assert ("hg" in flags) is fast and ("nh" in flags) is not fast


def flags_at(address):
    """The kernel's flags of the mapping at an address: hg with MADV_HUGEPAGE, nh with MADV_NOHUGEPAGE."""
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
            elif inside and line.startswith("VmFlags:"):
                return line.split()[1:]
    raise AssertionError("there is no such mapping")


def test_nothing_is_written(monkeypatch):
    """Between two arrays that are close to each other there may be memory of others."""
    monkeypatch.setattr(huge_pages, "_to_skip", 0)
    content = torch.full((140 * MIB,), 7, dtype=torch.uint8)
    begin, gap = content.data_ptr(), 1 << 16
    advise_huge([(begin, 70 * MIB - gap), (begin + 70 * MIB, 70 * MIB)])
    assert content.eq(7).all()


def test_the_speeds_are_measured():
    small, huge = huge_pages.first_touch_speeds()
    assert small > 0 and huge > 0
