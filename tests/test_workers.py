"""Threads for a block, and signals that interrupt it anywhere."""

import random
import signal
import threading
import time

import pytest

from firstloss.workers import Workers


def test_results_come_in_order():
    with Workers(3, "a") as workers:
        assert workers.map(lambda n: n * n, range(100)) == [n * n for n in range(100)]
        task = workers.submit(divmod, 7, 2)
        assert task.result() == task.result() == (3, 1)


def test_an_error_is_raised_where_the_result_is_asked_for():
    with pytest.raises(ZeroDivisionError), Workers(2, "a") as workers:
        workers.map(lambda n: 1 // n, [2, 1, 0])
    with Workers(2, "a") as workers:
        tasks = [workers.submit(lambda n: 1 // n, n) for n in (1, 0, 1)]
        assert tasks[2].result() == 1


def test_the_end_waits_for_all_and_after_an_error_for_those_that_run():
    done = []
    with Workers(1, "a") as workers:
        for n in range(5):
            workers.submit(done.append, n)
    assert done == list(range(5))
    begun, proceed = threading.Event(), threading.Event()

    def first():
        begun.set()
        proceed.wait()
        done.append("first")

    with pytest.raises(KeyError), Workers(1, "a") as workers:
        workers.submit(first)
        workers.submit(done.append, "second")
        begun.wait()
        threading.Timer(0.05, proceed.set).start()
        raise KeyError
    assert done[5:] == ["first"]


def test_threads_are_initialized_and_named():
    names = []
    with Workers(2, "name", lambda: names.append(threading.current_thread().name)) as workers:
        workers.map(time.sleep, [0.01] * 5)
    assert sorted(names) == ["name_0", "name_1"]


def test_a_thread_ends_when_nothing_is_left():
    before = threading.active_count()
    with Workers(2, "a") as workers:
        assert workers.submit(abs, -1).result() == 1
        end = time.monotonic() + 20
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() == before
        assert workers.map(abs, [-2, -3]) == [2, 3]


def test_an_interrupt_at_any_time_leaves_no_thread_waiting():
    """With `concurrent.futures`, some 1 of 1,000 of these never end."""
    rng, before = random.Random(0), threading.active_count()

    def interrupted(*_):
        raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupted)
    try:
        for _ in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 2e-3))
                with Workers(2, "a") as workers:
                    while True:
                        workers.map(time.sleep, [0.0] * 5)
            except KeyboardInterrupt:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, handler)
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= before
