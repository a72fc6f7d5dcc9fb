"""A rank's local states go into its ring: the host's at once, device tensors by asynchronous copies."""

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jitckpt._seen import gone_on
from jitckpt.bindings.interpose import stream_of
from jitckpt.bindings.memory import bytes_at
from jitckpt.encoding import tensor_file
from jitckpt.encoding.tree_codec import Encoded, Json, to_json
from jitckpt.ring.content import Content
from jitckpt.ring.format import FIRST, NUMBERS, PAGE, Region, limit_for, staged_bytes, word_of
from jitckpt.ring.gathering import Gathering
from jitckpt.ring.ring import Ring
from jitckpt.state.host_state import Unchanged


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
    content: "Content | None" = None  # as it was written last


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
        self._staging = Gathering()
        self._stream: Callable[[], int] | None = None
        self._taken = _Taken()
        self._unchanged: Unchanged | None = None  # tells whether the state is as it was written last
        self._gone_on: set[str] = set()  # names of what has gone on since the parts were taken
        self._provisional = 0  # the step of the last write, if that was in its forward pass
        self._shapes: list[tuple[str, torch.dtype, torch.Size]] = []  # of the host's tensors,
        self._order, self._head, _ = tensor_file.head_of({})  # and how their file begins

    def write_again(self, step: int, final: bool) -> bool:
        """Write the state after `step` if it is as it was, but for what goes on (random numbers, the loop's).

        Else, or where nothing can tell, returns False: it has to be taken, and written. Most steps need this
        alone. There all is cold in the caches, so little code is touched and nothing made anew.
        """
        unchanged, taken = self._unchanged, self._taken
        if unchanged is None or (new := gone_on(unchanged.looks, unchanged.going_on, taken.data)) is None:
            return False
        for one in unchanged.others:
            if not one.is_same():
                return False
        for name, value in new:
            if final or len(value) != len(taken.data[name]):
                return False
            taken.data[name] = value
            if taken.content is not None:
                taken.content.put(name, value)
            self._gone_on.add(name)
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
        self,
        step: int,
        final: bool,
        parts: Mapping[str, Encoded],
        unchanged: Unchanged | None = None,
        *,
        beside: bool = False,
    ) -> None:
        """Write the state after `step`, made of named parts. Never waits for the device.

        A part that is the same object as the last time is taken to say the same. unchanged: what tells, for
        `write_again`, whether the state is still what the parts say. beside: what was taken off the device in
        the forward pass stays until what is written now has come off it, and with that until the step ends.
        """
        if self._gone_on or not self._are_as_taken(parts):
            if not self._take_values(parts):
                self._take(parts)
            self._gone_on.clear()
        elif final and step == self._provisional:
            self._end_provisional(step)
            return
        if not self._write_taken(step, final, beside):
            self._taken = _Taken()
            self.write(step, final, parts, unchanged, beside=beside)
            return
        is_whole = unchanged is None or all(name in self._taken.data for name, _ in unchanged.going_on)
        self._unchanged = unchanged if is_whole else None

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
        if unchanged is None or gone_on(unchanged.looks, unchanged.going_on, self._taken.data) != []:
            return False
        for one in unchanged.others:  # noqa: SIM110  # all() of a generator is two calls more
            if not one.is_same():
                return False
        return True

    def _end_provisional(self, step: int) -> None:
        """The step has changed nothing of the last write on the host, where the region is named already."""
        self._provisional = 0
        taken = self._taken
        if taken.on_device and taken.content is not None:
            region = self._ring.regions(step)[True] = taken.content.regions[True]
            self._write_region(step, True, region)

    def _write_taken(self, step: int, final: bool, beside: bool = False) -> bool:
        """Write what was taken; False if it was too large, and something was left out."""
        taken = self._taken
        known = self._ring.regions(step)
        area = final or beside
        regions = self._next_regions(area, known) if area or known else taken.regions
        if taken.content is None or not taken.content.name_numbers(final, regions):
            taken.content = Content(
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
        self._provisional = 0 if final or (beside and taken.on_device) else step
        if taken.on_device:
            known[area] = regions[area]
            self._write_region(step, area, regions[area])
        return True

    def _next_regions(self, area: bool, known: Mapping[bool, Region]) -> dict[bool, Region]:
        """Return what there is of the step with the next write, and that names the final one beforehand."""
        taken = self._taken
        regions = {**known}
        if taken.on_device:
            for key in (True,) if area else (False, True):
                previous = known.get(key)
                number = (previous.number + 1) & NUMBERS if previous else FIRST
                regions[key] = Region(number, taken.entries)
        return regions

    def _write_region(self, step: int, final: bool, region: Region) -> None:
        taken = self._taken
        source = taken.source or self._staging.gather(taken.on_device)
        if self._stream is None:
            self._stream = stream_of(self._staging.device)
        place = self._ring.device_area(step, final)
        self._write_area(place, word_of(step, region.number), source, self._stream())

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
            new |= {key: part.tensors[key] for key in self._gone_on & part.tensors.keys()}
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
        while staged_bytes(on_device) > self._ring.area_bytes:
            del on_device[self._leave_out(on_device)]
        on_host = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "cpu"}
        shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in on_host.items()]
        if shapes != self._shapes:
            order, head, _ = tensor_file.head_of(on_host)
            self._shapes, self._order, self._head = shapes, order, head
        data = {name: _bytes_of(tensor) for name, tensor in on_host.items()}
        entries = to_json(self._staging.arrange(on_device) if on_device else {})
        first = Region(FIRST, entries)
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
        needed = sum(sizes.values()) + PAGE * len(sizes)  # with what tells of them, and gaps
        self._warn(
            f"{name} ({sizes[name]} bytes) does not fit into the {self._ring.area_bytes} bytes for this "
            "rank's own state of a step: saves are without it, and no start can go on from one where all "
            f"ranks leave it out. Give jitckpt.init local_state_limit={limit_for(needed, self._ring.slots)}."
        )
        return name


def _bytes_of(tensor: Tensor) -> bytes:
    """Return the elements of a tensor on the host that tree_codec has made."""
    return bytes_at(tensor.data_ptr(), tensor.nbytes)


def _lies_as_there(tensors: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return where how many bytes lie as they are to lie in an area: so does a single tensor, as a rule.

    They lie there as long as the tensor is captured anew when it comes to lie elsewhere.
    """
    only = next(iter(tensors.values()), None)
    if only is None or len(tensors) > 1 or not only.is_contiguous() or only.is_conj() or only.is_neg():
        return None
    return only.data_ptr(), only.nbytes
