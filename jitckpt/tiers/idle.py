"""What a rank tells its agent of when the network is idle: on page 0 of its memory, behind the words.

The number of the profile is 0 while it is written, and then a new one.
"""

import os
import struct

from jitckpt.decisions.idle_time import MOST_SPANS, Idle
from jitckpt.decisions.traffic import Span
from jitckpt.tiers import host_memory
from jitckpt.tiers.host_memory import PROFILE

PLACE = 512
_HEAD = struct.Struct("<Qd")  # how many spans; seconds of a minibatch
_SPAN = struct.Struct("<ddd")
SIZE = _HEAD.size + MOST_SPANS * _SPAN.size


def put(descriptor: int, number: int, idle: Idle) -> None:
    """Write the number-th profile, from 1."""
    spans = b"".join(
        _SPAN.pack(one.start_seconds, one.length_seconds, one.deviation_seconds)
        for one in idle.spans[:MOST_SPANS]
    )
    host_memory.put_word(descriptor, PROFILE, 0)
    head = _HEAD.pack(min(len(idle.spans), MOST_SPANS), idle.seconds)
    os.pwrite(descriptor, head + spans, PLACE)
    host_memory.put_word(descriptor, PROFILE, number)


def of(descriptor: int) -> tuple[int, Idle] | None:
    """Return the profile and its number; None if there is none, or it is just being written."""
    number = host_memory.word(descriptor, PROFILE)
    data = os.pread(descriptor, SIZE, PLACE)
    if not number or number != host_memory.word(descriptor, PROFILE):
        return None
    count, seconds = _HEAD.unpack_from(data)
    if count > MOST_SPANS:
        return None
    spans = (_SPAN.unpack_from(data, _HEAD.size + place * _SPAN.size) for place in range(count))
    return number, Idle(seconds, tuple(Span(*one) for one in spans))
