"""Pages that are the same in several images of a host's processes go to another host once."""

import random

import pytest

from jitckpt.agent.migration import same_pages
from jitckpt.agent.migration.same_pages import LEAST, PAGE, SameOrNew, SamePages

RANDOM = random.Random(7)


def pages(count: int) -> bytes:
    return RANDOM.randbytes(count * PAGE)


def runs(known: SamePages, image: str, data: bytes, at: int = 0, rank: int = 0) -> list[SameOrNew]:
    of_file = known.of(rank, image)
    assert of_file is not None
    return list(of_file.runs(at, data))


def test_what_has_gone_goes_no_second_time() -> None:
    """A process that was forked has changed two of its parent's pages, and has some of its own behind."""
    known, parent = SamePages(), pages(100)
    assert runs(known, "pages-1.img", parent, at=8 * PAGE) == [SameOrNew(0, len(parent), None)]
    child = parent[: 40 * PAGE] + pages(2) + parent[42 * PAGE :] + pages(3)
    first, second = 40 * PAGE, 42 * PAGE
    assert runs(known, "pages-2.img", child, rank=1) == [
        SameOrNew(0, first, (0, "pages-1.img", 8 * PAGE)),
        SameOrNew(first, second, None),
        SameOrNew(second, len(parent), (0, "pages-1.img", 50 * PAGE)),
        SameOrNew(len(parent), len(child), None),
    ]
    assert known.saved == len(parent) - 2 * PAGE


def test_few_in_a_row_go_again() -> None:
    """A word for each of them would take longer."""
    known = SamePages()
    some = pages(LEAST - 1)
    runs(known, "pages-1.img", some)
    assert runs(known, "pages-2.img", some) == [SameOrNew(0, len(some), None)]
    scattered = b"".join(some[page * PAGE : (page + 1) * PAGE] for page in reversed(range(LEAST - 1))) * 3
    assert runs(known, "pages-3.img", scattered) == [SameOrNew(0, len(scattered), None)]
    assert known.saved == 0


def test_what_is_twice_in_one_file_goes_once() -> None:
    known, some = SamePages(), pages(20)
    assert runs(known, "pages-1.img", some * 2) == [
        SameOrNew(0, len(some), None),
        SameOrNew(len(some), 2 * len(some), (0, "pages-1.img", 0)),
    ]


def test_images_without_pages_and_a_rest_that_is_none() -> None:
    known = SamePages()
    assert known.of(0, "core-7.img") is None
    assert known.of(0, "") is None
    data = pages(20) + b"rest"
    runs(known, "pages-1.img", data)
    assert runs(known, "pages-2.img", data) == [
        SameOrNew(0, 20 * PAGE, (0, "pages-1.img", 0)),
        SameOrNew(20 * PAGE, 20 * PAGE + 4, None),
    ]


def test_no_more_are_known_than_there_is_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_pages, "MOST", 20)
    known, some = SamePages(), pages(40)
    runs(known, "pages-1.img", some)
    assert runs(known, "pages-2.img", some)[0] == SameOrNew(0, 20 * PAGE, (0, "pages-1.img", 0))
    assert runs(known, "pages-3.img", some)[1] == SameOrNew(20 * PAGE, 40 * PAGE, None)
