"""The rank-local states of the last few steps, read from a ring that may outlive its rank."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jitckpt.encoding.tree_codec import Json
from jitckpt.errors import SaveError
from jitckpt.ring.format import (
    BEGUN,
    BLOB_HEADER,
    LAST_STEP,
    WORD,
    damage_is_said,
    device_area,
    host_area,
    read_blob,
    read_header,
    unpack,
    word_of,
)
from jitckpt.saves import layout
from jitckpt.saves.folders import SaveFolder
from jitckpt.saves.layout import Identity


@dataclass(frozen=True)
class LocalState:
    """The state of one rank after one step, in named parts (trees).

    `final`: taken after the optimizer step, not in the forward pass; where that has changed it on the host.
    `missing`: tensors that the tree names but that were too large to be kept, or had not come off the device.
    `left_out`: parts of the state that were too large. `earlier`: tensors as they were in the forward pass,
    since those that the trees name had not come off the device.
    """

    step: int
    final: bool
    trees: dict[str, Json]
    tensors: dict[str, Tensor]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]
    earlier: tuple[str, ...] = ()

    def document(self) -> dict[str, Json]:
        """Return all but the tensors, for a JSON file."""
        content: dict[str, Json] = {"final": self.final, "trees": self.trees}
        if self.earlier:
            content["earlier"] = list(self.earlier)
        return content | {"missing": list(self.missing), "left_out": list(self.left_out)}


def create() -> int:
    """Return a new, empty memfd for one rank's ring, which child processes may inherit by number."""
    return os.memfd_create("jitckpt-local-state", os.MFD_CLOEXEC)


@damage_is_said
def read_identity(descriptor: int) -> Identity | None:
    """Return whose ring it is; None if no worker has laid it out. Raises SaveError if it is damaged."""
    return (found := read_header(descriptor)) and found[0]


@damage_is_said
def read(descriptor: int) -> list[LocalState]:
    """Return the states that are whole, newest step first; the writer may be alive, dead or half-way.

    Raises SaveError if the ring itself is damaged.
    """
    header = read_header(descriptor)
    if header is None:
        return []
    _, slots, area_bytes = header
    states = [_read_slot(descriptor, slot, slots, area_bytes) for slot in range(slots)]
    return sorted((state for state in states if state), key=lambda state: -state.step)


@damage_is_said
def newest_step(descriptors: Sequence[int]) -> int:
    """Return the newest step that any of these ranks has begun, 0 if none. Raises SaveError if damaged."""
    return max((step_of(descriptor) for descriptor in descriptors), default=0)


def begun_step(descriptor: int) -> int:
    """Return the newest step that a rank has begun by a look at the heads alone; 0 if none.

    What a rank writes just now may be taken for written. Raises SaveError if the memory is damaged.
    """
    header = read_header(descriptor)
    if header is None:
        return 0
    _, slots, area_bytes = header
    places = [host_area(slot, version, slots, area_bytes) for slot in range(slots) for version in (0, 1)]
    heads = [BLOB_HEADER.unpack(os.pread(descriptor, BLOB_HEADER.size, place)) for place in places]
    written = [step for _, sequence, step, _ in heads if sequence and step < LAST_STEP]
    return int(max([_unwritten(descriptor), *written]))


def step_of(descriptor: int) -> int:
    """Return the newest step that a rank has begun, 0 if none."""
    header = read_header(descriptor)
    if header is None:
        return 0
    _, slots, area_bytes = header
    places = [host_area(slot, version, slots, area_bytes) for slot in range(slots) for version in (0, 1)]
    found = [read_blob(descriptor, place, area_bytes) for place in places]
    return max([_unwritten(descriptor), *(blob[1] for blob in found if blob is not None)])


def _unwritten(descriptor: int) -> int:
    """Return the newest step that a rank has begun since it writes none of them any more, if so; else 0."""
    step = int(WORD.unpack(os.pread(descriptor, WORD.size, BEGUN))[0])
    return step if step < LAST_STEP else 0


def _read_slot(descriptor: int, slot: int, slots: int, area_bytes: int) -> LocalState | None:
    newest: tuple[int, int, bytes] | None = None
    for version in (0, 1):
        found = read_blob(descriptor, host_area(slot, version, slots, area_bytes), area_bytes)
        if found is not None and (newest is None or found > newest):
            newest = found
    if newest is None:
        return None
    _, step, content = newest
    document, host_tensors = unpack(content)
    tensors = dict(host_tensors)
    wanted = {name for region in document["regions"].values() for name in region["entries"]}
    earlier: tuple[str, ...] = ()
    for final in ("true", "false"):
        region = document["regions"].get(final)
        if region is not None and not wanted & tensors.keys():
            words, area = device_area(slot, final == "true", slots, area_bytes)
            both = WORD.pack(word_of(step, region["number"]))
            # The later word first: what is written anew meanwhile has changed the earlier one.
            if os.pread(descriptor, WORD.size, words + WORD.size) == both:
                data = os.pread(descriptor, area_bytes, area)
                if os.pread(descriptor, WORD.size, words) == both:
                    tensors |= _tensors(data, region)
                    if final == "false" and "true" in document["regions"]:
                        earlier = tuple(sorted(region["entries"]))
    missing = tuple(sorted(_named(document["trees"]) - tensors.keys()))
    return LocalState(
        step,
        document["final"],
        document["trees"],
        tensors,
        missing,
        tuple(document["left_out"]),
        earlier if document["final"] else (),
    )


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


def _named(tree: Json) -> set[str]:
    """Return the names of all tensors in a tree."""
    if isinstance(tree, list):
        return set().union(*map(_named, tree)) if tree else set()
    if isinstance(tree, dict):
        if "$tensor" in tree or "$array" in tree:
            return {tree.get("$tensor") or tree["$array"]}
        return set().union(*map(_named, tree.values())) if tree else set()
    return set()


SAVER: layout.SaverName = "ring"
SAVER_AT_DEATH: layout.SaverName = "ring at death"  # the rank may have lived, and its device gone on


def write_save(descriptor: int, root: Path, step: int, by: str = "", saver: layout.SaverName = SAVER) -> int:
    """Write a ring's state after `step` as a save of its rank; returns the bytes written.

    by: who writes it, where another process may write the same save at the same time. saver: SAVER, or
    SAVER_AT_DEATH for a first draft. Raises SaveError if the ring has no whole state of that step, or the
    file system refuses.
    """
    identity = read_identity(descriptor)
    state = next((state for state in read(descriptor) if state.step == step), None)
    if identity is None or state is None:
        raise SaveError(f"The rank left no whole state of its own for step {step}.")
    with SaveFolder(root, identity, step, "local", saver, by=by) as folder:
        folder.add_tensors(layout.TENSORS_FILE, state.tensors)
        folder.add_json(layout.STATE_FILE, {"local": state.document()})
        return folder.commit()[1]
