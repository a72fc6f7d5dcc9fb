"""A tree with its tensors as one piece of bytes, for a state that travels or is kept as a whole."""

import json
import struct
from typing import Any

from jitckpt.encoding import tensor_file, tree_codec
from jitckpt.encoding.tree_codec import Encoded, to_json

_LENGTH = struct.Struct("<I")


def pack(encoded: Encoded) -> bytes:
    """Return it as bytes; its tensors lie on the host."""
    text = to_json(encoded.tree).encode()
    pieces = [_LENGTH.pack(len(text)), text]
    tensor_file.write(lambda piece: pieces.append(bytes(piece)), encoded.tensors)
    return b"".join(pieces)


def unpack(data: bytes) -> Any:
    """Return what was encoded. Raises SaveError or TreeError if that is not what the bytes are."""
    (length,) = _LENGTH.unpack_from(data)
    end = _LENGTH.size + length
    return tree_codec.decode(json.loads(data[_LENGTH.size : end]), tensor_file.read(data[end:]))
