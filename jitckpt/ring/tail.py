"""What is new in a ring since the last time, for a copy of it on another host."""

import os

from jitckpt.ring.format import (
    BLOB_HEADER,
    FIRST_WORD,
    JSON,
    WORD,
    damage_is_said,
    device_area,
    host_area,
    read_blob,
    read_header,
    seal,
    unpack,
    used_bytes,
    word_of,
)
from jitckpt.saves.layout import Identity


class Tail:
    """Follows a ring: says which of its pieces are new since the last time, for a copy of it."""

    def __init__(self, descriptor: int) -> None:
        self.size = 0  # bytes of the whole ring
        self._descriptor = descriptor
        self._first = b""  # page, as far as it says how the ring is laid out
        self._header: tuple[Identity, int, int] | None = None
        self._seen: dict[int, bytes] = {}  # by place: the header of a host part, the words of an area

    @damage_is_said
    def news(self) -> list[tuple[int, bytes]]:
        """Return new pieces and their places; written in this order, they leave a ring that is always whole.

        Raises SaveError if the ring is damaged.
        """
        pieces = []
        first = os.pread(self._descriptor, FIRST_WORD, 0)
        if first != self._first:  # the training has begun, or begun anew
            self._header, self._first, self._seen = read_header(self._descriptor), first, {}
            self.size = os.fstat(self._descriptor).st_size
            pieces.append((0, first))
        if self._header is None:
            return []
        _, slots, area_bytes = self._header
        for slot in range(slots):
            for version in (0, 1):
                pieces += self._host_part(host_area(slot, version, slots, area_bytes), area_bytes)
            for final in (False, True):
                pieces += self._area(slot, final, slots, area_bytes)
        return pieces

    def _host_part(self, place: int, area_bytes: int) -> list[tuple[int, bytes]]:
        head = os.pread(self._descriptor, BLOB_HEADER.size, place)
        if head == self._seen.get(place) or (blob := read_blob(self._descriptor, place, area_bytes)) is None:
            return []
        sequence, step, content = blob
        whole = bytearray(BLOB_HEADER.size) + content
        seal(whole, sequence, step)
        self._seen[place] = bytes(whole[: BLOB_HEADER.size])
        return [(place, bytes(whole))]

    def _area(self, slot: int, final: bool, slots: int, area_bytes: int) -> list[tuple[int, bytes]]:
        """Return what the device has written, with the words that make it whole behind it."""
        words, area = device_area(slot, final, slots, area_bytes)
        both = os.pread(self._descriptor, 2 * WORD.size, words)
        begun, ended = both[: WORD.size], both[WORD.size :]
        if begun != ended or not any(ended) or both == self._seen.get(words):
            return []
        parts = [
            read_blob(self._descriptor, host_area(slot, version, slots, area_bytes), area_bytes)
            for version in (0, 1)
        ]
        named = [(part[1], unpack(part[2])[0]["regions"].get(JSON[final])) for part in parts if part]
        regions = [(step, region) for step, region in named if region]
        (word,) = WORD.unpack(ended)
        used = [used_bytes(region) for step, region in regions if word_of(step, region["number"]) == word]
        if not used:
            return []  # the device is ahead of what the host has written
        data = os.pread(self._descriptor, used[0], area)
        if os.pread(self._descriptor, WORD.size, words) != begun:
            return []  # it is being written anew
        self._seen[words] = both
        return [(area, data), (words, both)]
