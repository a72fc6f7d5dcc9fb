"""The main thread is held where it would go on with Python code."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jitckpt.worker.saving import main_thread

LIMIT = 60  # seconds


def while_another(holds: Callable[[], object], works: Callable[[], object]) -> None:
    """Work on the main thread while another one holds it; raises what that one raises."""
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(holds)
        while not holding.done():
            works()
        holding.result()


def test_it_changes_nothing_while_it_is_held() -> None:
    counted, main = [0], threading.get_ident()

    def hold() -> None:
        for _ in range(5):
            with main_thread.held(main) as came:
                assert came is not None
                assert came.wait(LIMIT)
                before = counted[0]
                time.sleep(0.05)
                assert counted[0] == before
            until = time.monotonic() + LIMIT
            while counted[0] == before and time.monotonic() < until:
                time.sleep(0.001)
            assert counted[0] > before, "it goes on"

    def count() -> None:
        counted[0] += 1

    while_another(hold, count)


def test_a_thread_that_comes_back_from_a_call_is_held_then() -> None:
    begun, ends, back = (threading.Event() for _ in range(3))
    main = threading.get_ident()

    def hold() -> None:
        assert begun.wait(LIMIT)
        with main_thread.held(main) as came:
            assert came is not None
            ends.set()
            assert came.wait(LIMIT), "the call has ended"
            time.sleep(0.02)
            assert not back.is_set()

    def call() -> None:
        begun.set()
        ends.wait()
        back.set()

    while_another(hold, call)
    assert back.is_set()


def test_another_thread_is_not_held() -> None:
    assert threading.main_thread().ident == threading.get_ident()
    with main_thread.held(0) as came:
        assert came is None


def test_a_call_that_comes_too_late_holds_nobody() -> None:
    with ThreadPoolExecutor(1) as pool:
        main = threading.get_ident()

        def hold() -> bool:
            with main_thread.held(main) as came:
                return came is not None

        holding = pool.submit(hold)
        time.sleep(0.2)  # longer than is waited for it
        assert holding.result()
    assert threading.get_ident() == main
