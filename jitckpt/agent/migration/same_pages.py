"""Pages that processes have in common go to another host once: most of a DataLoader's are its parent's."""

from dataclasses import dataclass

from jitckpt._pages import PAGE, PageIndex

LEAST = 16  # in a row, for which it is worth to say where they stand
MOST = 1 << 20  # that are known, of 4 GiB: they take 50 MB of this process's memory
_FILE = 32  # bits: a place is the file's number << _FILE, and the page's in there


@dataclass(frozen=True)
class PartOfFile:
    """So many bytes of a file. same: the rank, the image and the place where they have gone by now.

    sum: their checksum, where they have not.
    """

    at: int
    size: int
    same: tuple[int, str, int] | None
    sum: str


class SamePages:
    """Of one way. saved: bytes that did not have to go."""

    def __init__(self, most: int = MOST) -> None:
        self.saved = 0
        self._files: list[tuple[int, str]] = []
        self._known, self._nothing = PageIndex(most, LEAST), PageIndex(0, LEAST)

    def of(self, rank: int, image: str) -> "SamePagesOfFile":
        """Return what looks through a file that goes now. Only the images of pages have some in common."""
        self._files.append((rank, image))
        known = self._known if image.startswith("pages-") else self._nothing
        return SamePagesOfFile(self, known, len(self._files) - 1)

    def where(self, place: int) -> tuple[int, str, int]:
        """Return the rank, the image and where in there, of a place."""
        return *self._files[place >> _FILE], (place & ((1 << _FILE) - 1)) * PAGE


@dataclass(frozen=True)
class SamePagesOfFile:
    """The pages of one file, which are looked through in their order."""

    way: SamePages
    known: PageIndex
    number: int

    def parts(self, file: int, at: int, size: int) -> list[PartOfFile]:
        """Part what stands at this place of the file, which is a page's. Raises OSError."""
        own = self.number << _FILE | at // PAGE
        parts = []
        for begin, end, place, proof in self.known.parts(file, at, size, own):
            same = None if place < 0 else self.way.where(place)
            if same is not None:
                self.way.saved += end - begin
            parts.append(PartOfFile(at + begin, end - begin, same, proof))
        return parts
