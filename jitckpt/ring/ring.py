"""The ring of a rank's local states, as its worker writes it."""

import json
import mmap
import os
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from jitckpt._seen import write_sealed
from jitckpt.bindings import behind_proxy
from jitckpt.ring.format import (
    BEGUN,
    FILE_HEADER,
    MAGIC,
    PAGE,
    WANTED,
    WORD,
    Region,
    area_bytes,
    device_area,
    device_base,
    digest,
    host_area,
    word_of,
)
from jitckpt.saves.layout import Identity


@dataclass
class _Slot:
    areas: tuple[int, int]  # where those for the host part begin
    step: int = -1
    writes: int = 0
    regions: dict[bool, Region] = field(default_factory=dict)


# Memory that the device may write to stays mapped until the process ends: nobody can tell when a device that
# hangs is done with it, and another ring in the same place could not be registered.
_registered: list[Tensor] = []


class Ring:
    """The writing side, in the worker. `limit`: bytes of the whole ring; they are taken only as used."""

    def __init__(self, descriptor: int, identity: Identity, slots: int, limit: int) -> None:
        """Lay the ring out anew in a memfd; raises ValueError where the limit is too small for any state."""
        self.slots = slots
        self.area_bytes = area_bytes(limit, slots)
        if self.area_bytes < 4 * PAGE:
            least = PAGE + slots * (PAGE + 4 * 4 * PAGE)
            raise ValueError(f"local_state_limit is {limit} bytes; the least that works is {least}.")
        self.descriptor = descriptor
        self._slots = [
            _Slot((host_area(slot, 0, slots, self.area_bytes), host_area(slot, 1, slots, self.area_bytes)))
            for slot in range(slots)
        ]
        self._sequence = 0
        size = PAGE + slots * (4 * self.area_bytes + PAGE)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        text = json.dumps(asdict(identity)).encode()
        header = FILE_HEADER.pack(MAGIC, slots, self.area_bytes, len(text)) + text
        self._memory[: len(header) + 16] = header + digest(header)
        self._device_areas: list[tuple[int, int]] = []  # their addresses there, two for each slot

    def wanted_step(self) -> int:
        """Return the step after which the agent wants a save; 0 if it never wanted one."""
        (step,) = WORD.unpack_from(self._memory, WANTED)
        return int(step)

    def note_begun(self, step: int) -> None:
        """Let the agent know that the rank has begun a step of which it writes nothing."""
        WORD.pack_into(self._memory, BEGUN, step)

    def write_host(self, step: int, blob: bytearray) -> None:
        """Put the host part of a step in place; what was there of it before stays whole until this is.

        blob: the part behind BLOB_HEADER.size bytes, which are filled in.
        """
        slot = self._slots[step % self.slots]
        if slot.step != step:
            self.regions(step)  # its slot begins anew
        start = slot.areas[slot.writes % 2]
        slot.writes += 1
        self._sequence += 1
        write_sealed(self._memory, start, blob, self._sequence, step)

    def regions(self, step: int) -> dict[bool, Region]:
        """Return the regions of a step so far, by whether they are final; the caller changes them."""
        slot = self._slots[step % self.slots]
        if slot.step != step:
            slot.step, slot.writes, slot.regions = step, 0, {}  # the first area serves most steps alone
        return slot.regions

    def is_written(self, step: int) -> bool:
        """Return whether the device has written all of its areas of this step that it was told to."""
        slot = step % self.slots
        for final, region in self.regions(step).items():
            words, _ = device_area(slot, final, self.slots, self.area_bytes)
            if WORD.unpack_from(self._memory, words + WORD.size) != (word_of(step, region.number),):
                return False
        return True

    def device_area(self, step: int, final: bool) -> tuple[int, int]:
        """Return the addresses of the area's two words (begun, ended) and of the area, for the device."""
        if not self._device_areas:
            first = self._register() - device_base(self.slots, self.area_bytes)
            for slot in range(self.slots):
                for version in (False, True):
                    words, area = device_area(slot, version, self.slots, self.area_bytes)
                    self._device_areas.append((first + words, first + area))
        return self._device_areas[2 * (step % self.slots) + final]

    def _register(self) -> int:
        """Page-lock what the device writes to; return where it begins."""
        begin = device_base(self.slots, self.area_bytes)
        if behind_proxy.is_there():
            return behind_proxy.share(self.descriptor, begin, len(self._memory) - begin)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8)[begin:]
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        _registered.append(memory)
        return memory.data_ptr()
