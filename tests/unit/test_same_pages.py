"""Pages that are the same in several images of a host's processes go to another host once."""

import os
import random
from collections.abc import Callable, Iterator

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jitckpt._pages import PAGE, PageIndex, checksum
from jitckpt.agent.migration.same_pages import LEAST, SamePages

RANDOM = random.Random(7)

Cut = tuple[int, int, tuple[int, str, int] | None]  # from, to, and where the same has gone


def pages(count: int) -> bytes:
    return RANDOM.randbytes(count * PAGE)


def sum_of(data: bytes) -> str:
    """Return the checksum of a piece, in plain Python."""
    each = [xxhash.xxh3_128_digest(data[at : at + PAGE]) for at in range(0, len(data), PAGE)]
    return xxhash.xxh3_128_hexdigest(b"".join(each))


@pytest.fixture
def file() -> Iterator[int]:
    file = os.memfd_create("image")
    yield file
    os.close(file)


@pytest.fixture
def runs(file: int) -> Callable[..., list[Cut]]:
    def runs(known: SamePages, image: str, data: bytes, at: int = 0, rank: int = 0) -> list[Cut]:
        os.ftruncate(file, 0)
        os.pwrite(file, data, at)
        parts = known.of(rank, image).parts(file, at, len(data))
        for one in parts:
            assert one.sum == ("" if one.same else sum_of(data[one.at - at : one.at - at + one.size]))
        return [(one.at - at, one.at - at + one.size, one.same) for one in parts]

    return runs


def test_what_has_gone_goes_no_second_time(runs: Callable[..., list[Cut]]) -> None:
    """A process that was forked has changed two of its parent's pages, and has some of its own behind."""
    known, parent = SamePages(), pages(100)
    assert runs(known, "pages-1.img", parent, at=8 * PAGE) == [(0, len(parent), None)]
    child = parent[: 40 * PAGE] + pages(2) + parent[42 * PAGE :] + pages(3)
    first, second = 40 * PAGE, 42 * PAGE
    assert runs(known, "pages-2.img", child, rank=1) == [
        (0, first, (0, "pages-1.img", 8 * PAGE)),
        (first, second, None),
        (second, len(parent), (0, "pages-1.img", 50 * PAGE)),
        (len(parent), len(child), None),
    ]
    assert known.saved == len(parent) - 2 * PAGE


def test_few_in_a_row_go_again(runs: Callable[..., list[Cut]]) -> None:
    """A word for each of them would take longer."""
    known = SamePages()
    some = pages(LEAST - 1)
    runs(known, "pages-1.img", some)
    assert runs(known, "pages-2.img", some) == [(0, len(some), None)]
    scattered = b"".join(some[page * PAGE : (page + 1) * PAGE] for page in reversed(range(LEAST - 1))) * 3
    assert runs(known, "pages-3.img", scattered) == [(0, len(scattered), None)]
    assert known.saved == 0


def test_what_is_twice_in_one_file_goes_once(runs: Callable[..., list[Cut]]) -> None:
    known, some = SamePages(), pages(20)
    assert runs(known, "pages-1.img", some * 2) == [
        (0, len(some), None),
        (len(some), 2 * len(some), (0, "pages-1.img", 0)),
    ]


def test_images_without_pages_and_a_rest_that_is_none(runs: Callable[..., list[Cut]]) -> None:
    known, data = SamePages(), pages(20) + b"rest"
    for image in ("core-7.img", "", ""):
        assert runs(known, image, data) == [(0, len(data), None)]
    assert runs(known, "pages-0.img", b"rest") == [(0, 4, None)]
    runs(known, "pages-1.img", data)
    assert runs(known, "pages-2.img", data) == [
        (0, 20 * PAGE, (0, "pages-1.img", 0)),
        (20 * PAGE, 20 * PAGE + 4, None),
    ]


def test_no_more_are_known_than_there_is_memory_for(runs: Callable[..., list[Cut]]) -> None:
    known, some = SamePages(most=20), pages(40)
    runs(known, "pages-1.img", some)
    assert runs(known, "pages-2.img", some)[0] == (0, 20 * PAGE, (0, "pages-1.img", 0))
    assert runs(known, "pages-3.img", some)[1] == (20 * PAGE, 40 * PAGE, None)


def test_a_file_that_ends_too_soon_or_can_not_be_read(file: int) -> None:
    with pytest.raises(OSError, match="No data available"):
        SamePages().of(0, "pages-1.img").parts(file, 0, PAGE)
    with pytest.raises(OSError, match="Bad file descriptor"):
        SamePages().of(0, "pages-1.img").parts(-1, 0, PAGE)


@given(st.binary(max_size=3 * PAGE))
def test_a_checksum_is_that_of_the_pages(data: bytes) -> None:
    assert checksum(data) == checksum(memoryview(bytearray(data))) == sum_of(data)


def test_a_checksum_is_of_bytes_in_one_piece() -> None:
    with pytest.raises(ValueError, match="in one piece"):
        checksum(memoryview(b"abcdef")[::2])


class Model:
    """The same as PageIndex, page for page."""

    def __init__(self, most: int, least: int) -> None:
        self._most, self._least, self._known = most, least, dict[int, int]()

    def parts(self, content: list[int], own: int) -> list[tuple[int, int, int]]:
        places = []
        for number, page in enumerate(content, own):
            if page not in self._known and len(self._known) < self._most:
                self._known[page] = number
            places.append(self._known.get(page, number))
        found: list[tuple[int, int, int]] = []
        at = 0
        while at < len(places):
            end = at + 1
            if places[at] != own + at:
                while end < len(places) and places[end] == places[end - 1] + 1 and places[end] != own + end:
                    end += 1
                if end - at >= self._least:
                    found.append((at, end, places[at]))
                    at = end
                    continue
            if found and found[-1][2] < 0:
                found[-1] = (found[-1][0], end, -1)
            else:
                found.append((at, end, -1))
            at = end
        return found


CONTENTS = st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=6)


@given(CONTENTS, st.integers(0, 12), st.integers(1, 4), st.integers(0, PAGE - 1))
def test_parts_are_those_of_a_plain_model(
    contents: list[list[int]], most: int, least: int, rest: int
) -> None:
    index, model = PageIndex(most, least), Model(most, least)
    file = os.memfd_create("image")
    try:
        for number, content in enumerate(contents):
            data = b"".join(page.to_bytes(PAGE, "big") for page in content) + bytes(rest)
            os.pwrite(file, data, 0)
            own = number << 32
            expected = [(begin * PAGE, end * PAGE, same) for begin, end, same in model.parts(content, own)]
            if rest and expected and expected[-1][2] < 0:
                expected[-1] = (expected[-1][0], len(data), -1)
            elif rest:
                expected.append((len(content) * PAGE, len(data), -1))
            found = index.parts(file, 0, len(data), own)
            assert [one[:3] for one in found] == expected
            assert all(proof == ("" if same >= 0 else sum_of(data[a:b])) for a, b, same, proof in found)
    finally:
        os.close(file)
