"""Pages that processes have in common go to another host once: most of a DataLoader's are its parent's."""

from collections.abc import Iterator
from dataclasses import dataclass

import xxhash

PAGE = 4096  # bytes
LEAST = 16  # in a row, for which it is worth to say where they stand
MOST = 1 << 20  # that are known, of 4 GiB: they take 150 MB of this process's memory
_FILE = 32  # bits: a place is the file's number << _FILE, and the page's in there


@dataclass(frozen=True)
class SameOrNew:
    """Bytes of a piece of a file. same: the rank, the image and the place where they have gone by now."""

    begin: int
    end: int
    same: tuple[int, str, int] | None


class SamePages:
    """Of one way. saved: bytes that did not have to go."""

    def __init__(self) -> None:
        self.saved = 0
        self._files: list[tuple[int, str]] = []
        self._places: dict[bytes, int] = {}  # by a page's hash

    def of(self, rank: int, image: str) -> "SamePagesOfFile | None":
        """Return what looks through a file that goes now; None if it has no pages."""
        if not image.startswith("pages-"):
            return None
        self._files.append((rank, image))
        return SamePagesOfFile(self, len(self._files) - 1)

    def place(self, page: memoryview, own: int) -> int:
        """Return where the same page has gone first; `own`: nowhere yet, so it goes there."""
        digest = xxhash.xxh3_128_digest(page)
        if len(self._places) < MOST:
            return self._places.setdefault(digest, own)
        return self._places.get(digest, own)

    def where(self, place: int) -> tuple[int, str, int]:
        """Return the rank, the image and where in there, of a place."""
        return *self._files[place >> _FILE], (place & ((1 << _FILE) - 1)) * PAGE


@dataclass(frozen=True)
class SamePagesOfFile:
    """The pages of one file, which are looked through in their order."""

    known: SamePages
    number: int

    def runs(self, at: int, data: bytes) -> Iterator[SameOrNew]:
        """Part what stands at this place of the file."""
        begun = 0  # of what is not there yet, or too little in a row
        for begin, end, place in self._in_a_row(at, memoryview(data)):
            if end - begin < LEAST * PAGE:
                continue
            if begun < begin:
                yield SameOrNew(begun, begin, None)
            yield SameOrNew(begin, end, self.known.where(place))
            self.known.saved += end - begin
            begun = end
        if begun < len(data):
            yield SameOrNew(begun, len(data), None)

    def _in_a_row(self, at: int, view: memoryview) -> Iterator[tuple[int, int, int]]:
        """Yield pages that have gone by now, and stand in a row there, too: from, to, and the place there."""
        first = self.number << _FILE | at // PAGE
        begin, begin_place, expected = 0, -1, -1
        for page in range(len(view) // PAGE):
            own = first + page
            place = self.known.place(view[page * PAGE : (page + 1) * PAGE], own)
            if place != expected or place == own:
                if begin_place >= 0:
                    yield begin, page * PAGE, begin_place
                begin, begin_place = page * PAGE, -1 if place == own else place
            expected = place + 1 if place != own else -1
        if begin_place >= 0:
            yield begin, len(view) // PAGE * PAGE, begin_place
