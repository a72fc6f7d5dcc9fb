"""How many tests a run's logs say have passed."""

from version_record import counted

PYTEST = """..s.x                                        [100%]
= slowest 30 durations =
5.01s call     test_a.py::test_waits in 12.5s
2 failed, 3 passed, 1 skipped, 1 error, 1 rerun in 729.10s (0:12:09)
"""
CTEST = "95% tests passed, 3 tests failed out of 612\n\nTotal Test time (real) = 40.44 sec\n"


def test_counts_what_passed_failed_and_was_skipped() -> None:
    assert counted([PYTEST]) == {"failed": 3, "passed": 3, "skipped": 1}


def test_counts_those_of_ctest_and_of_all_logs() -> None:
    assert counted([CTEST, PYTEST, "test: no such thing\n"]) == {"failed": 6, "passed": 612, "skipped": 1}


def test_a_run_that_was_cut_off_counts_nothing() -> None:
    assert not counted(["..........", ""])
