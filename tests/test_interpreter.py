"""Settings of the interpreter that Firstloss changes temporarily: the user's values are reported and restored."""

import contextlib
import gc
import signal
import sys
import threading
import weakref

import pytest

from firstloss import interpreter
from firstloss.interpreter import (
    Undo,
    gc_thresholds,
    is_collecting,
    pause,
    paused,
    set_collecting,
    switch_interval,
)
from firstloss.runtime.step import process_settings


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch):
    """As for users: unfreezes the objects that conftest.py has frozen, and freezes them again afterwards."""
    gc.unfreeze()
    monkeypatch.setattr(interpreter, "_others_freeze", False)
    yield
    gc.freeze()


@contextlib.contextmanager
def until_undone():
    with Undo() as undo, undo:
        pause(undo)
        yield


class Cycle:
    def __init__(self):
        self.me = self


def test_nothing_is_collected_inside_and_all_can_be_afterwards():
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with paused():
            kept = [[] for _ in range(100_000)]
            garbage = weakref.ref(Cycle())
            assert not collections and not gc.isenabled()
    finally:
        gc.callbacks.remove(note)
    assert gc.isenabled() and len(kept) == 100_000 and not gc.get_freeze_count()
    assert garbage() is not None
    gc.collect()
    assert garbage() is None


def test_it_begins_no_collection_afterwards():
    with paused():
        kept = [[] for _ in range(100_000)]
    assert gc.get_count()[0] < 1000 and len(kept) == 100_000


def test_who_has_switched_collection_off_finds_it_off():
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_somebody_has_frozen_stays_so():
    gc.freeze()
    try:
        with paused():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_what_is_freed_as_often_as_made_begins_no_collection():
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with until_undone():
            lists = [[] for _ in range(100_000)]
            del lists
            assert not gc.isenabled()
        assert gc.isenabled() and not collections
    finally:
        gc.callbacks.remove(note)


def test_a_pause_leaves_collection_off_where_it_was_off():
    gc.disable()
    try:
        with until_undone():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("block", [until_undone, paused])
def test_what_is_wanted_is_what_others_have_set(block):
    """Steps are identified by the settings of others, although other threads have blocks of ours open at the time."""
    with block():
        assert is_collecting()
        set_collecting(False)
        assert not is_collecting()
        set_collecting(True)
        assert is_collecting() and not gc.isenabled()
    assert is_collecting() and gc.isenabled()
    try:
        with block():
            set_collecting(False)
        assert not is_collecting() and not gc.isenabled()
        with block():
            assert not is_collecting()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.fixture
def users():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def test_blocks_that_overlap_in_two_threads(users):
    """The block that began during the other one ends last."""
    entered, leave = threading.Event(), threading.Event()

    def work():
        with switch_interval.changed():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=work)
    with switch_interval.changed():
        other.start()
        assert entered.wait(60)
    assert sys.getswitchinterval() < users == switch_interval.get()
    leave.set()
    other.join()
    assert sys.getswitchinterval() == switch_interval.get() == users


def test_it_is_no_other_setting_of_a_step(users):
    before = process_settings.settings()
    with switch_interval.changed():
        assert process_settings.settings() == before


def test_what_is_wanted_in_a_block_is_set_after_it(users):
    with switch_interval.changed():
        switch_interval.set(0.002)
        assert sys.getswitchinterval() < 0.002 == switch_interval.get()
    assert sys.getswitchinterval() == 0.002
    with switch_interval.changed():
        sys.setswitchinterval(0.001)
        assert switch_interval.get() == 0.001
    assert sys.getswitchinterval() == 0.001
    switch_interval.set(0.003)
    assert sys.getswitchinterval() == 0.003


@pytest.fixture
def users_thresholds():
    """The user's thresholds, restored afterwards."""
    thresholds = gc.get_threshold()
    yield thresholds
    gc.set_threshold(*thresholds)


def test_a_thread_beside_the_users_collects_young_objects_alone(users_thresholds):
    collections = []

    def note(phase, info):
        collections.append(info["generation"])

    gc.callbacks.append(note)
    try:
        with gc_thresholds.changed():
            kept = [[[]] for _ in range(300_000)]
            assert gc.isenabled() and collections and 2 not in collections
    finally:
        gc.callbacks.remove(note)
    assert gc.get_threshold() == users_thresholds and len(kept) == 300_000 and not gc.get_freeze_count()


def test_such_blocks_overlap_and_the_user_sees_none_of_them(users_thresholds):
    first, second = gc_thresholds.changed(), gc_thresholds.changed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc_thresholds.get() == users_thresholds != gc.get_threshold()
    second.__exit__(None, None, None)
    assert gc_thresholds.get() == users_thresholds == gc.get_threshold()


def test_what_the_user_sets_during_such_a_block_stays(users_thresholds):
    with gc_thresholds.changed():
        gc.set_threshold(500, 5, 5)
    assert gc.get_threshold() == gc_thresholds.get() == (500, 5, 5)
    with gc_thresholds.changed():
        gc_thresholds.set((600, 6, 6))
        assert gc_thresholds.get() == (600, 6, 6) != gc.get_threshold()
        gc.disable()
    try:
        assert gc.get_threshold() == (600, 6, 6) and not gc.isenabled()
    finally:
        gc.enable()


def test_a_block_ends_where_no_signal_has_a_handler():
    """As in a process that was started with Ctrl-C ignored."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        for number, handler in before.items():
            if callable(handler) and not isinstance(handler, signal.Handlers):
                signal.signal(number, signal.SIG_IGN)
        with interpreter.Uninterrupted():
            assert interpreter.Uninterrupted._is_open
        assert not interpreter.Uninterrupted._is_open
    finally:
        for number, handler in before.items():
            if callable(handler) and not isinstance(handler, signal.Handlers):
                signal.signal(number, handler)


def test_a_block_entered_twice_is_left_once_although_a_signal_comes_before_its_exit(monkeypatch):
    """Python may handle a signal after the block, and before the first line of `__exit__`."""
    left = []

    @interpreter.interruptible_inside
    def block():
        try:
            yield
        finally:
            left.append(True)

    exits = []
    leave = interpreter._InterruptibleInside.__exit__

    def interrupted_at_first(self, *exception):
        exits.append(exception)
        if len(exits) == 1:
            raise KeyboardInterrupt
        return leave(self, *exception)

    monkeypatch.setattr(interpreter._InterruptibleInside, "__exit__", interrupted_at_first)
    blocks = block()
    with pytest.raises(KeyboardInterrupt), blocks, blocks:
        assert left == []
    assert left == [True] and len(exits) == 2 and exits[1][0] is KeyboardInterrupt
    blocks = block()
    with blocks, blocks:
        assert left == [True]
    assert left == [True, True]
    with pytest.raises(RuntimeError, match="another block"), blocks:
        pass
    assert left == [True, True]
