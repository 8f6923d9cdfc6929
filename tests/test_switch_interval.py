"""Threads that take turns more often while ours work: the user's own interval is what is told, and comes back."""

import sys
import threading

import pytest

from firstloss import switch_interval
from firstloss.runtime.step import process_settings


@pytest.fixture
def users():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    yield 0.004
    sys.setswitchinterval(before)


def test_blocks_that_overlap_in_two_threads(users):
    """The one that began within the other's time ends last."""
    entered, leave = threading.Event(), threading.Event()

    def work():
        with switch_interval.shortened():
            entered.set()
            leave.wait(60)

    other = threading.Thread(target=work)
    with switch_interval.shortened():
        other.start()
        assert entered.wait(60)
    assert sys.getswitchinterval() < users == switch_interval.interval()
    leave.set()
    other.join()
    assert sys.getswitchinterval() == switch_interval.interval() == users


def test_it_is_no_other_setting_of_a_step(users):
    before = process_settings.settings()
    with switch_interval.shortened():
        assert process_settings.settings() == before


def test_what_is_wanted_in_a_block_is_set_after_it(users):
    with switch_interval.shortened():
        switch_interval.want(0.002)
        assert sys.getswitchinterval() < 0.002 == switch_interval.interval()
    assert sys.getswitchinterval() == 0.002
    switch_interval.want(0.003)
    assert sys.getswitchinterval() == 0.003
