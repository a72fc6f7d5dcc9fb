"""The host part of a state, as it is written to a ring again and again."""

from collections.abc import Iterable, Mapping

from jitckpt.encoding.tree_codec import to_json
from jitckpt.ring.format import BLOB_HEADER, JSON, PART, Region

_DIGITS = 5  # of any number, so that all take as much space


class Content:
    """The host part of a state, to be changed in its place where the next one differs in values alone.

    blob: as Ring.write_host takes it.
    """

    def __init__(
        self,
        *,
        final: bool,
        trees_text: str,
        head: bytes,
        tensors: Mapping[str, bytes],
        regions: Mapping[bool, Region],
        left_out: Iterable[str],
    ) -> None:
        """trees_text: as JSON; head, tensors: a safetensors file in pieces."""
        self._final = final
        self.regions = {**regions}
        self._numbers: dict[bool, int] = {}  # where in the blob they are
        self._tensors: dict[str, int] = {}
        text = f'{{"final":{JSON[final]},"left_out":{to_json(sorted(left_out))},"regions":{{'
        for key, one in regions.items():
            text += f'{"," if self._numbers else ""}"{JSON[key]}":{{"number":'
            self._numbers[key] = BLOB_HEADER.size + PART.size + len(text)
            text += f'{one.number:{_DIGITS}d},"entries":{one.entries}}}'
        encoded = f'{text}}},"trees":{trees_text}}}'.encode()
        self.blob = bytearray(bytes(BLOB_HEADER.size) + PART.pack(len(encoded)) + encoded + head)
        for name, data in tensors.items():
            self._tensors[name] = len(self.blob)
            self.blob += data

    def name_numbers(self, final: bool, regions: Mapping[bool, Region]) -> bool:
        """Put the regions' numbers in; False if not only by these another content would differ."""
        if final != self._final or len(regions) != len(self.regions):
            return False
        for key, one in regions.items():
            known = self.regions.get(key)
            if one is known:
                continue
            if known is None or one.entries != known.entries:
                return False
            place = self._numbers[key]
            self.blob[place : place + _DIGITS] = b"%*d" % (_DIGITS, one.number)
            self.regions[key] = one
        return True

    def put(self, name: str, data: bytes) -> None:
        """Put other values of a tensor in."""
        place = self._tensors[name]
        self.blob[place : place + len(data)] = data
