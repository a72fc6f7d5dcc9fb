from typing_extensions import Buffer

PAGE: int  # bytes

def checksum(data: Buffer) -> str:
    """Return what stands for these bytes: the checksum of their pages' checksums."""

class PageIndex:
    """Which pages have stood where; a place is the number of one, as `own` counts them."""

    def __init__(self, most: int, least: int) -> None:
        """most: pages that are known. least: in a row, for which it is worth to say where they have stood."""

    def parts(self, file: int, at: int, size: int, own: int) -> list[tuple[int, int, int, str]]:
        """Part so much of a file, from `at` on: where each part begins and ends, counted from there.

        Then where the same pages have stood first; -1 if they are new, and then their checksum. From now on
        all of them are known, the first at the place `own`. Raises OSError, also where the file ends before.
        """
