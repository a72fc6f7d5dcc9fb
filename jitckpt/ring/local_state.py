"""The rank-local state of the last few steps in memory that outlives the rank (a memfd that the agent owns).

Page 0 says whose ring it is, in its last word after which step the agent wants a save, and in the one before
whether the rank may end. Then, for each slot (step modulo slots), two areas for the host part, which the
writes of a step take in turn, so that one is whole once the first write is done; their checksum tells. Then,
for each slot, a page of words and two areas for tensors copied off the device: one provisional (from the
forward pass on), one final (after the optimizer step). The device writes a word before it begins to write an
area and one after it has ended; an area is whole if both words are made of the step and the number that the
host part names. So a process may be killed at any moment.
"""

import ctypes
import functools
import json
import mmap
import operator
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import xxhash
from torch import Tensor

from jitckpt.bindings import behind_proxy
from jitckpt.bindings.interpose import current_stream
from jitckpt.encoding import tensor_file
from jitckpt.encoding.tree_codec import Encoded, Json, to_json
from jitckpt.errors import JitckptError, SaveError
from jitckpt.saves import layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity
from jitckpt.state.host_state import Unchanged

PAGE = 4096
MAGIC = b"JITCKPT2"
_FILE_HEADER = struct.Struct("<8sQQI")  # magic, slots, bytes of an area, length of the identity
_BLOB_HEADER = struct.Struct("<16sQQQ")  # checksum of what follows it: sequence, step, length, content
_CHECKSUM = 16  # bytes
_WORD = struct.Struct("<Q")
_PART = struct.Struct("<I")
_WANTED = PAGE - _WORD.size
_MAY_END = _WANTED - _WORD.size
_FIRST = 1  # number of a step's writes of an area
_NUMBERS = 0xFFFF
LAST_STEP = 1 << 63
MARGIN = 3  # steps until a save that is asked for: all ranks have to hear of it before


Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")
_OF_NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def _damage_is_said(read: Callable[Arguments, Value]) -> Callable[Arguments, Value]:
    """Have it raise SaveError whatever lies in a ring: checksums tell that a worker wrote it, not what."""

    @functools.wraps(read)
    def checked(*arguments: Arguments.args, **named: Arguments.kwargs) -> Value:
        try:
            return read(*arguments, **named)
        except SaveError:
            raise
        except (*_OF_NONSENSE, JitckptError, MemoryError, RuntimeError, struct.error) as error:
            raise SaveError(f"The memory of a rank's local state is damaged: {error!r:.200}.") from error

    return checked


@dataclass(frozen=True)
class LocalState:
    """The state of one rank after one step, in named parts (trees).

    `final`: taken after the optimizer step, not in the forward pass; where that has changed it on the host.
    `missing`: tensors that the tree names but that were too large to be kept, or had not come off the device.
    `left_out`: parts of the state that were too large.
    """

    step: int
    final: bool
    trees: dict[str, Json]
    tensors: dict[str, Tensor]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]

    def document(self) -> dict[str, Json]:
        """Return all but the tensors, for a JSON file."""
        content = {"final": self.final, "trees": self.trees}
        return content | {"missing": list(self.missing), "left_out": list(self.left_out)}


class Region(NamedTuple):
    """What an area holds after one of a step's writes, and that write's number."""

    number: int
    entries: str  # JSON: of each device tensor, by name, its type, shape and offset


def area_bytes(limit: int, slots: int) -> int:
    """Return how large each part of a state may be, in a ring of so many slots and at most `limit` bytes."""
    return ((limit - PAGE) // slots - PAGE) // 4 // PAGE * PAGE


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
            _Slot((_host_area(slot, 0, slots, self.area_bytes), _host_area(slot, 1, slots, self.area_bytes)))
            for slot in range(slots)
        ]
        self._sequence = 0
        size = PAGE + slots * (4 * self.area_bytes + PAGE)
        os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        text = json.dumps(asdict(identity)).encode()
        header = _FILE_HEADER.pack(MAGIC, slots, self.area_bytes, len(text)) + text
        self._memory[: len(header) + 16] = header + _digest(header)
        self._device_areas: list[tuple[int, int]] = []  # their addresses there, two for each slot

    def wanted_step(self) -> int:
        """Return the step after which the agent wants a save; 0 if it never wanted one."""
        (step,) = _WORD.unpack_from(self._memory, _WANTED)
        return int(step)

    def write_host(self, step: int, blob: bytearray) -> None:
        """Put the host part of a step in place; what was there of it before stays whole until this is.

        blob: the part behind _BLOB_HEADER.size bytes, which are filled in.
        """
        self.regions(step)  # if it is a new step, its slot begins anew
        slot = self._slots[step % self.slots]
        start = slot.areas[slot.writes % 2]
        slot.writes += 1
        self._sequence += 1
        _seal(blob, self._sequence, step)
        self._memory[start : start + len(blob)] = blob

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
            words, _ = _device_area(slot, final, self.slots, self.area_bytes)
            if _WORD.unpack_from(self._memory, words + _WORD.size) != (_word(step, region.number),):
                return False
        return True

    def device_area(self, step: int, final: bool) -> tuple[int, int]:
        """Return the addresses of the area's two words (begun, ended) and of the area, for the device."""
        if not self._device_areas:
            first = self._register() - _device_base(self.slots, self.area_bytes)
            for slot in range(self.slots):
                for version in (False, True):
                    words, area = _device_area(slot, version, self.slots, self.area_bytes)
                    self._device_areas.append((first + words, first + area))
        return self._device_areas[2 * (step % self.slots) + final]

    def _register(self) -> int:
        """Page-lock what the device writes to; return where it begins."""
        begin = _device_base(self.slots, self.area_bytes)
        if behind_proxy.is_there():
            return behind_proxy.share(self.descriptor, begin, len(self._memory) - begin)
        memory = torch.frombuffer(self._memory, dtype=torch.uint8)[begin:]
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
        _registered.append(memory)
        return memory.data_ptr()


@dataclass
class _Taken:
    """What the parts of the last write were, and what became of them."""

    parts: dict[str, Encoded] = field(default_factory=dict)
    trees: dict[str, Json] = field(default_factory=dict)
    trees_text: str = "{}"
    on_host: dict[str, Tensor] = field(default_factory=dict)
    data: dict[str, bytes] = field(default_factory=dict)  # of those
    on_device: list[Tensor] = field(default_factory=list)
    source: tuple[int, int] | None = None  # where these lie, if they need no gathering, and how many bytes
    entries: str = "{}"
    regions: Mapping[bool, Region] = field(default_factory=dict)  # of the first write of a step
    left_out: tuple[str, ...] = ()
    content: "_Content | None" = None  # as it was written last


class Recorder:
    """Writes one rank's local states into its ring, device tensors by asynchronous copies."""

    def __init__(
        self,
        ring: Ring,
        write_area: Callable[[tuple[int, int], int, tuple[int, int], int], None],
        warn: Callable[[str], None],
    ) -> None:
        """write_area: as Native's."""
        self._ring, self._write_area, self._warn = ring, write_area, warn
        self._too_large: set[str] = set()  # names of tensors and parts
        self._staging = _Staging()
        self._taken = _Taken()
        self._unchanged: Unchanged | None = None  # tells whether the state is as it was written last, but for
        self._generated = b""  # a device's random numbers, which were these
        self._gone_on = ""  # their name, if they are no more what the parts say
        self._provisional = 0  # the step of the last write, if that was in its forward pass
        self._shapes: list[tuple[str, torch.dtype, torch.Size]] = []  # of the host's tensors,
        self._order, self._head, _ = tensor_file.head_of({})  # and how their file begins

    def write_again(self, step: int, final: bool) -> bool:
        """Write the state after `step` if it is as it was, but for the device's random numbers.

        Else, or where nothing can tell, returns False: it has to be taken, and written. Most steps need this
        alone. There all is cold in the caches, so little code is touched and nothing made anew.
        """
        unchanged = self._unchanged
        if unchanged is None:
            return False
        for look in unchanged.looks:
            if not look.is_same():
                return False
        if unchanged.generator is not None:
            name, capture = unchanged.generator
            generated = capture()
            if generated != self._generated:
                if final or len(generated) != len(self._generated):
                    return False
                taken = self._taken
                taken.data[name] = self._generated = generated
                if taken.content is not None:
                    taken.content.put(name, generated)
                self._gone_on = name
        if final:
            is_said = step == self._provisional
            if is_said:
                self._end_provisional(step)
            return is_said
        if not self._write_taken(step, final):
            self._taken, self._unchanged = _Taken(), None
            return False
        return True

    def write(
        self, step: int, final: bool, parts: Mapping[str, Encoded], unchanged: Unchanged | None = None
    ) -> None:
        """Write the state after `step`, made of named parts. Never waits for the device.

        A part that is the same object as the last time is taken to say the same. unchanged: what tells, for
        `write_again`, whether the state is still what the parts say.
        """
        if self._gone_on or not self._are_as_taken(parts):
            if not self._take_values(parts):
                self._take(parts)
            self._gone_on = ""
        elif final and step == self._provisional:
            self._end_provisional(step)
            return
        if not self._write_taken(step, final):
            self._taken = _Taken()
            self.write(step, final, parts, unchanged)
            return
        generator = unchanged and unchanged.generator
        self._generated = self._taken.data.get(generator[0], b"") if generator else b""
        self._unchanged = unchanged if self._generated or not generator else None

    def write_if_changed(self, step: int, parts: Mapping[str, Encoded], unchanged: Unchanged | None) -> None:
        """Write the final state after `step` again if it is not as it was written."""
        if not self.is_taken(parts):
            self.write(step, True, parts, unchanged)

    def is_taken(self, parts: Mapping[str, Encoded]) -> bool:
        """Whether these parts say what was written last. Tensors on a device: whether they are the same."""
        taken = self._taken
        kept = {name: part for name, part in parts.items() if name not in self._too_large}
        if {name: part.tree for name, part in kept.items()} != taken.trees:
            return False
        tensors = {name: tensor for part in kept.values() for name, tensor in part.tensors.items()}
        on_device = {one.data_ptr() for one in taken.on_device}
        return all(
            _bytes_of(one) == taken.data.get(name) if one.is_cpu else one.data_ptr() in on_device
            for name, one in tensors.items()
            if name not in self._too_large
        )

    def is_as_written(self) -> bool:
        """Whether the state is what was written last, as far as that can be told at once."""
        unchanged = self._unchanged
        if unchanged is None or not all(look.is_same() for look in unchanged.looks):
            return False
        return unchanged.generator is None or unchanged.generator[1]() == self._generated

    def _end_provisional(self, step: int) -> None:
        """The step has changed nothing of the last write on the host, where the region is named already."""
        self._provisional = 0
        taken = self._taken
        if taken.on_device and taken.content is not None:
            self._write_region(step, True, taken.content.regions[True])

    def _write_taken(self, step: int, final: bool) -> bool:
        """Write what was taken; False if it was too large, and something was left out."""
        taken = self._taken
        known = self._ring.regions(step)
        regions = self._next_regions(final, known) if final or known else taken.regions
        if taken.content is None or not taken.content.name_numbers(final, regions):
            taken.content = _Content(
                final=final,
                trees_text=taken.trees_text,
                head=self._head,
                tensors={name: taken.data[name] for name in self._order},
                regions=regions,
                left_out=taken.left_out,
            )
        blob = taken.content.blob
        if len(blob) > self._ring.area_bytes:
            sizes = {name: len(json.dumps(tree)) for name, tree in taken.trees.items()}
            self._leave_out({**sizes, **taken.on_host})
            return False
        self._ring.write_host(step, blob)
        self._provisional = 0 if final else step
        if taken.on_device:
            self._write_region(step, final, regions[final])
        return True

    def _next_regions(self, final: bool, known: Mapping[bool, Region]) -> dict[bool, Region]:
        """Return what there is of the step with the next write, and that names the final one beforehand."""
        taken = self._taken
        regions = {**known}
        if taken.on_device:
            for key in (True,) if final else (False, True):
                previous = known.get(key)
                number = (previous.number + 1) & _NUMBERS if previous else _FIRST
                regions[key] = Region(number, taken.entries)
        return regions

    def _write_region(self, step: int, final: bool, region: Region) -> None:
        taken, ring = self._taken, self._ring
        ring.regions(step)[final] = region
        source = taken.source or self._staging.gather(taken.on_device)
        stream = current_stream(self._staging.device)
        self._write_area(ring.device_area(step, final), _word(step, region.number), source, stream)

    def _are_as_taken(self, parts: Mapping[str, Encoded]) -> bool:
        taken = self._taken.parts
        return parts.keys() == taken.keys() and all(map(operator.is_, parts.values(), taken.values()))

    def _take_values(self, parts: Mapping[str, Encoded]) -> bool:
        """Take parts of which nothing but values on the host is new since the last time; False for others."""
        taken = self._taken
        if parts.keys() != taken.parts.keys():
            return False
        new: dict[str, Tensor] = {}
        for name, part in parts.items():
            before = taken.parts[name]
            if part is not before:
                if part.tree is not before.tree or part.tensors.keys() != before.tensors.keys():
                    return False
                for key, tensor in part.tensors.items():
                    if tensor is not before.tensors[key]:
                        new[key] = tensor
            if self._gone_on in part.tensors:
                new[self._gone_on] = part.tensors[self._gone_on]
        for name, tensor in new.items():
            known = taken.on_host.get(name)
            if (
                known is None
                or not tensor.is_cpu
                or tensor.dtype != known.dtype
                or tensor.shape != known.shape
            ):
                return False
        taken.parts = dict(parts)
        taken.on_host.update(new)
        for name, tensor in new.items():
            taken.data[name] = _bytes_of(tensor)
            if taken.content is not None:
                taken.content.put(name, taken.data[name])
        return True

    def _take(self, parts: Mapping[str, Encoded]) -> None:
        kept = {name: part for name, part in parts.items() if name not in self._too_large}
        trees = {name: part.tree for name, part in kept.items()}
        tensors = {name: tensor for part in kept.values() for name, tensor in part.tensors.items()}
        for name in self._too_large & tensors.keys():
            del tensors[name]
        on_device = {name: tensor for name, tensor in tensors.items() if tensor.device.type != "cpu"}
        while _staged_bytes(on_device) > self._ring.area_bytes:
            del on_device[self._leave_out(on_device)]
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in on_host.items()]
        if shapes != self._shapes:
            order, head, _ = tensor_file.head_of(on_host)
            self._shapes, self._order, self._head = shapes, order, head
        data = {name: _bytes_of(tensor) for name, tensor in on_host.items()}
        entries = to_json(self._staging.arrange(on_device) if on_device else {})
        first = Region(_FIRST, entries)
        self._taken = _Taken(
            parts=dict(parts),
            trees=trees,
            trees_text=to_json(trees),
            on_host=on_host,
            data=data,
            on_device=[*on_device.values()],
            source=_lies_as_there(on_device),
            entries=entries,
            regions={False: first, True: first} if on_device else {},
            left_out=tuple(parts.keys() - kept.keys()),
        )

    def _leave_out(self, candidates: Mapping[str, Tensor | int]) -> str:
        """Leave the largest (tensor, or part of so many bytes) out from now on; returns its name."""
        sizes = {
            name: value.nbytes if isinstance(value, Tensor) else value for name, value in candidates.items()
        }
        name = max(sizes, key=lambda key: sizes[key])
        self._too_large.add(name)
        self._warn(
            f"{name} ({sizes[name]} bytes) does not fit into the {self._ring.area_bytes} bytes for this "
            "rank's own state of a step: after a failure of this rank it comes from a replica. Raise "
            "local_state_limit."
        )
        return name


class _Staging:
    """One flat tensor on the device, into which all tensors are gathered before one copy to the host."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._shapes: list[tuple[str, torch.dtype, torch.Size]] = []
        self._entries: dict[str, tuple[str, list[int], int]] = {}
        self._views: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        self._flat: Tensor | None = None
        self._last_stream: torch.cuda.Stream | None = None

    def arrange(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int], int]]:
        """Return where each tensor comes to lie: its type, shape and offset."""
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if shapes != self._shapes:
            self._shapes, self._entries, self._views = shapes, {}, {}
            self.device = next(iter(tensors.values())).device
            self._flat = None
            offset = 0
            for name, tensor in tensors.items():
                self._entries[name] = (str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset)
                offset += _aligned(tensor.nbytes)
        return self._entries

    def gather(self, tensors: list[Tensor]) -> tuple[int, int]:
        """Return where to copy how many bytes from."""
        if self._flat is None:
            self._flat = self._gathering(tensors)
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_stream(self._last_stream)  # the flat tensor is still being read there
        self._last_stream = stream
        for indices, views in self._views.values():
            torch._foreach_copy_(views, [tensors[index] for index in indices])
        return self._flat.data_ptr(), self._flat.nbytes

    def _gathering(self, tensors: list[Tensor]) -> Tensor:
        """Return a new flat tensor, with a view for each of the others."""
        size = sum(_aligned(tensor.nbytes) for tensor in tensors)
        flat = torch.empty(size, dtype=torch.uint8, device=self.device)
        for index, (tensor, (_, _, offset)) in enumerate(zip(tensors, self._entries.values(), strict=True)):
            view = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            indices, views = self._views.setdefault(tensor.dtype, ([], []))
            indices.append(index)
            views.append(view)
        return flat


class Tail:
    """Follows a ring: says which of its pieces are new since the last time, for a copy of it."""

    def __init__(self, descriptor: int) -> None:
        self.size = 0  # bytes of the whole ring
        self._descriptor = descriptor
        self._first = b""  # page, as far as it says how the ring is laid out
        self._header: tuple[Identity, int, int] | None = None
        self._seen: dict[int, bytes] = {}  # by place: the header of a host part, the words of an area

    @_damage_is_said
    def news(self) -> list[tuple[int, bytes]]:
        """Return new pieces and their places; written in this order, they leave a ring that is always whole.

        Raises SaveError if the ring is damaged.
        """
        pieces = []
        first = os.pread(self._descriptor, _MAY_END, 0)
        if first != self._first:  # the training has begun, or begun anew
            self._header, self._first, self._seen = _read_header(self._descriptor), first, {}
            self.size = os.fstat(self._descriptor).st_size
            pieces.append((0, first))
        if self._header is None:
            return []
        _, slots, area_bytes = self._header
        for slot in range(slots):
            for version in (0, 1):
                pieces += self._host_part(_host_area(slot, version, slots, area_bytes), area_bytes)
            for final in (False, True):
                pieces += self._area(slot, final, slots, area_bytes)
        return pieces

    def _host_part(self, place: int, area_bytes: int) -> list[tuple[int, bytes]]:
        head = os.pread(self._descriptor, _BLOB_HEADER.size, place)
        if head == self._seen.get(place) or (blob := _read_blob(self._descriptor, place, area_bytes)) is None:
            return []
        sequence, step, content = blob
        whole = bytearray(_BLOB_HEADER.size) + content
        _seal(whole, sequence, step)
        self._seen[place] = bytes(whole[: _BLOB_HEADER.size])
        return [(place, bytes(whole))]

    def _area(self, slot: int, final: bool, slots: int, area_bytes: int) -> list[tuple[int, bytes]]:
        """Return what the device has written, with the words that make it whole behind it."""
        words, area = _device_area(slot, final, slots, area_bytes)
        both = os.pread(self._descriptor, 2 * _WORD.size, words)
        begun, ended = both[: _WORD.size], both[_WORD.size :]
        if begun != ended or not any(ended) or both == self._seen.get(words):
            return []
        parts = [
            _read_blob(self._descriptor, _host_area(slot, version, slots, area_bytes), area_bytes)
            for version in (0, 1)
        ]
        named = [(part[1], _unpack(part[2])[0]["regions"].get(_JSON[final])) for part in parts if part]
        regions = [(step, region) for step, region in named if region]
        (word,) = _WORD.unpack(ended)
        used = [_used(region) for step, region in regions if _word(step, region["number"]) == word]
        if not used:
            return []  # the device is ahead of what the host has written
        data = os.pread(self._descriptor, used[0], area)
        if os.pread(self._descriptor, _WORD.size, words) != begun:
            return []  # it is being written anew
        self._seen[words] = both
        return [(area, data), (words, both)]


def create() -> int:
    """Return a new, empty memfd for one rank's ring, which child processes may inherit by number."""
    return os.memfd_create("jitckpt-local-state", os.MFD_CLOEXEC)


@_damage_is_said
def read_identity(descriptor: int) -> Identity | None:
    """Return whose ring it is; None if no worker has laid it out. Raises SaveError if it is damaged."""
    return (found := _read_header(descriptor)) and found[0]


@_damage_is_said
def read(descriptor: int) -> list[LocalState]:
    """Return the states that are whole, newest step first; the writer may be alive, dead or half-way.

    Raises SaveError if the ring itself is damaged.
    """
    header = _read_header(descriptor)
    if header is None:
        return []
    _, slots, area_bytes = header
    states = [_read_slot(descriptor, slot, slots, area_bytes) for slot in range(slots)]
    return sorted((state for state in states if state), key=lambda state: -state.step)


def want_save(descriptors: Sequence[int], margin: int = MARGIN) -> int | None:
    """Ask the ranks of all these rings to save after the same step, `margin` from now; return that step.

    None if some rank has made no step yet. Raises SaveError if a ring is damaged.
    """
    newest = [_newest_step(descriptor) for descriptor in descriptors]
    if not newest or 0 in newest:
        return None
    step = max(newest) + margin
    want_save_after(descriptors, step)
    return step


def want_save_after(descriptors: Sequence[int], step: int) -> None:
    """Ask the ranks of all these rings to save after this step, if they have not come to it yet."""
    for descriptor in descriptors:
        os.pwrite(descriptor, _WORD.pack(step), _WANTED)


def let_end(descriptor: int) -> None:
    """Tell the rank of this ring that it may end, once its script is at its end."""
    os.pwrite(descriptor, _WORD.pack(1), _MAY_END)


def may_end(descriptor: int) -> bool:
    """Return whether the rank of this ring may end, once its script is at its end."""
    return any(os.pread(descriptor, _WORD.size, _MAY_END))


@_damage_is_said
def newest_step(descriptors: Sequence[int]) -> int:
    """Return the newest step that any of these ranks has begun, 0 if none. Raises SaveError if damaged."""
    return max((_newest_step(descriptor) for descriptor in descriptors), default=0)


def begun_step(descriptor: int) -> int:
    """Return the newest step that a rank has begun by a look at the heads alone; 0 if none.

    What a rank writes just now may be taken for written. Raises SaveError if the memory is damaged.
    """
    header = _read_header(descriptor)
    if header is None:
        return 0
    _, slots, area_bytes = header
    places = [_host_area(slot, version, slots, area_bytes) for slot in range(slots) for version in (0, 1)]
    heads = [_BLOB_HEADER.unpack(os.pread(descriptor, _BLOB_HEADER.size, place)) for place in places]
    return max((step for _, sequence, step, _ in heads if sequence and step < LAST_STEP), default=0)


def _newest_step(descriptor: int) -> int:
    header = _read_header(descriptor)
    if header is None:
        return 0
    _, slots, area_bytes = header
    places = [_host_area(slot, version, slots, area_bytes) for slot in range(slots) for version in (0, 1)]
    found = [_read_blob(descriptor, place, area_bytes) for place in places]
    return max((blob[1] for blob in found if blob is not None), default=0)


def _read_header(descriptor: int) -> tuple[Identity, int, int] | None:
    data = os.pread(descriptor, PAGE, 0)
    if not data[:_MAY_END].strip(b"\0"):
        return None
    if len(data) < _FILE_HEADER.size:
        raise SaveError("The memory of a rank's local state is damaged: it is too short.")
    magic, slots, area_bytes, length = _FILE_HEADER.unpack_from(data)
    end = _FILE_HEADER.size + length
    size = os.fstat(descriptor).st_size
    if (
        magic != MAGIC
        or end + 16 > _MAY_END
        or _digest(data[:end]) != data[end : end + 16]
        or size != PAGE + slots * (4 * area_bytes + PAGE)
    ):
        raise SaveError("The memory of a rank's local state is damaged: its first page is not valid.")
    return (
        Identity(**layout.parse_object(data[_FILE_HEADER.size : end], "The ring's identity")),
        slots,
        area_bytes,
    )


def _read_slot(descriptor: int, slot: int, slots: int, area_bytes: int) -> LocalState | None:
    newest: tuple[int, int, bytes] | None = None
    for version in (0, 1):
        found = _read_blob(descriptor, _host_area(slot, version, slots, area_bytes), area_bytes)
        if found is not None and (newest is None or found > newest):
            newest = found
    if newest is None:
        return None
    _, step, content = newest
    document, host_tensors = _unpack(content)
    tensors = dict(host_tensors)
    wanted = {name for region in document["regions"].values() for name in region["entries"]}
    for final in ("true", "false"):
        region = document["regions"].get(final)
        if region is not None and not wanted & tensors.keys():
            words, area = _device_area(slot, final == "true", slots, area_bytes)
            both = _WORD.pack(_word(step, region["number"]))
            # The later word first: what is written anew meanwhile has changed the earlier one.
            if os.pread(descriptor, _WORD.size, words + _WORD.size) == both:
                data = os.pread(descriptor, area_bytes, area)
                if os.pread(descriptor, _WORD.size, words) == both:
                    tensors |= _tensors(data, region)
    missing = tuple(sorted(_named(document["trees"]) - tensors.keys()))
    return LocalState(
        step, document["final"], document["trees"], tensors, missing, tuple(document["left_out"])
    )


def _read_blob(descriptor: int, start: int, area_bytes: int) -> tuple[int, int, bytes] | None:
    data = os.pread(descriptor, _BLOB_HEADER.size, start)
    checksum, sequence, step, length = _BLOB_HEADER.unpack(data)
    if sequence == 0 or length > area_bytes - _BLOB_HEADER.size:
        return None
    content = os.pread(descriptor, length, start + _BLOB_HEADER.size)
    return (sequence, step, content) if _digest(data[_CHECKSUM:], content) == checksum else None


def _tensors(data: bytes, region: Json) -> dict[str, Tensor]:
    """Return the tensors of an area."""
    tensors = {}
    for name, (dtype_name, shape, offset) in region["entries"].items():
        dtype = getattr(torch, dtype_name)
        size = torch.Size(shape).numel() * dtype.itemsize
        raw = bytearray(data[offset : offset + size])
        flat = (
            torch.frombuffer(raw, dtype=torch.uint8)
            if raw
            else torch.empty(0, dtype=torch.uint8, device="cpu")
        )
        tensors[name] = flat.view(dtype).view(shape)
    return tensors


_JSON = {True: "true", False: "false"}
_DIGITS = 5  # of any number, so that all take as much space


class _Content:
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
        text = f'{{"final":{_JSON[final]},"left_out":{to_json(sorted(left_out))},"regions":{{'
        for key, one in regions.items():
            text += f'{"," if self._numbers else ""}"{_JSON[key]}":{{"number":'
            self._numbers[key] = _BLOB_HEADER.size + _PART.size + len(text)
            text += f'{one.number:{_DIGITS}d},"entries":{one.entries}}}'
        encoded = f'{text}}},"trees":{trees_text}}}'.encode()
        self.blob = bytearray(bytes(_BLOB_HEADER.size) + _PART.pack(len(encoded)) + encoded + head)
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


def _unpack(content: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    (length,) = _PART.unpack_from(content)
    document = layout.parse_object(content[_PART.size : _PART.size + length], "A rank's local state")
    return document, tensor_file.read(content[_PART.size + length :])


def _used(region: Json) -> int:
    """Return how many bytes of its area a region takes."""
    return max(
        (
            offset + torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for dtype, shape, offset in region["entries"].values()
        ),
        default=0,
    )


def _named(tree: Json) -> set[str]:
    """Return the names of all tensors in a tree."""
    if isinstance(tree, list):
        return set().union(*map(_named, tree)) if tree else set()
    if isinstance(tree, dict):
        if "$tensor" in tree or "$array" in tree:
            return {tree.get("$tensor") or tree["$array"]}
        return set().union(*map(_named, tree.values())) if tree else set()
    return set()


def _word(step: int, number: int) -> int:
    """Return what the device writes around one of a step's writes of an area."""
    return (step << 16) | number


def _seal(blob: bytearray, sequence: int, step: int) -> None:
    """Fill the header in."""
    _BLOB_HEADER.pack_into(blob, 0, b"", sequence, step, len(blob) - _BLOB_HEADER.size)
    blob[:_CHECKSUM] = xxhash.xxh3_128_digest(memoryview(blob)[_CHECKSUM:])


def _digest(*parts: bytes | bytearray) -> bytes:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a tensor on the host that tree_codec has made."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _lies_as_there(tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return where how many bytes lie as they are to lie in an area: so does a single tensor, as a rule.

    They lie there as long as the tensor is captured anew when it comes to lie elsewhere.
    """
    only = next(iter(tensors.values()), None)
    if only is None or len(tensors) > 1 or not only.is_contiguous() or only.is_conj() or only.is_neg():
        return None
    return only.data_ptr(), only.nbytes


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def _staged_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in tensors.values())


def _host_area(slot: int, version: int, slots: int, area_bytes: int) -> int:
    return PAGE + (2 * slot + version) * area_bytes


def _device_base(slots: int, area_bytes: int) -> int:
    return PAGE + 2 * slots * area_bytes


def _device_area(slot: int, final: bool, slots: int, area_bytes: int) -> tuple[int, int]:
    """Return the offsets of the area's two words and of the area."""
    start = _device_base(slots, area_bytes) + slot * (PAGE + 2 * area_bytes)
    return start + 16 * final, start + PAGE + final * area_bytes


def write_save(descriptor: int, root: Path, step: int, by: str = "") -> int:
    """Write a ring's state after `step` as a save of its rank; returns the bytes written.

    by: who writes it, where another process may write the same save at the same time.
    Raises SaveError if the ring has no whole state of that step, or the file system refuses.
    """
    identity = read_identity(descriptor)
    state = next((state for state in read(descriptor) if state.step == step), None)
    if identity is None or state is None:
        raise SaveError(f"The rank left no whole state of its own for step {step}.")
    with SaveFolder(root, identity, step, "local", "ring", by=by) as folder:
        folder.add_tensors(layout.TENSORS_FILE, state.tensors)
        folder.add_json(layout.STATE_FILE, {"local": state.document()})
        return folder.commit()[1]
