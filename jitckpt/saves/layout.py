"""What lies where in a checkpoint directory, and the JSON documents in it.

DIR/job.json                                 which job the directory belongs to
DIR/events.jsonl                             what happened, one JSON line an event
DIR/step-0000000020/rank-00001/              a replica: model, optimizer and rank 1's own state after step 20
    tensors.safetensors  state.json  metadata.json
DIR/step-0000000020/local-00001/             rank 1's own state alone
DIR/starts/                                  which starts have begun, and from where (starts.py)
"""

import json
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import xxhash

from jitckpt.errors import SaveError

# 2: optimizer state by the parameters' names, and how tensors lie in memory. 3: metadata.json has a checksum
# of itself.
FORMAT = 3
# A variable: where each relative checkpoint directory, by the name that the script gave it, lay in the job's
# first start.
JOB_FILE = "job.json"
EVENTS_FILE = "events.jsonl"
METADATA_FILE = "metadata.json"
TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
WHOLE_NOTE = "whole"  # in the folder of a step of which all shards were saved

SaverName = Literal["builtin", "callback", "ring", "ring at death"]
SAVERS: tuple[SaverName, ...] = ("builtin", "callback", "ring", "ring at death")

Kind = Literal["rank", "local"]
RESTRUCTURED = "restructured"  # in the place of a fingerprint
_STEP = re.compile(r"step-(\d{10,18})")
_RANK = re.compile(r"(rank|local)-(\d{5,9})")
_CHECKSUM = re.compile(r"[0-9a-f]{32}")
_OWN_CHECKSUM = b',\n "checksum": '  # the last entry of a metadata.json, of all that stands before it
_END_OF_TIME = 253402300800.0  # the year 10000, beyond which there are no dates


@dataclass(frozen=True)
class Identity:
    """Which job a save belongs to and which part of its state it holds."""

    job: str  # the directory's id, from job.json
    # Of the names, shapes, types and parts of what the script has built; "" where a callback saves.
    fingerprint: str
    world_size: int
    rank: int
    shard: int
    shards: int
    layout: str = ""  # how the state lies on the ranks, in words; "" where nothing is known of it
    start: int = 0  # the number of the start that made it; see starts.py

    def restructured(self) -> "Identity":
        """Return that of a state that the training has built otherwise since, which its names alone tell."""
        return replace(self, fingerprint=RESTRUCTURED)


@dataclass(frozen=True)
class FileEntry:
    """A file of a save: its path inside the folder, its size in bytes, its xxh3_128 in hexadecimal."""

    name: str
    size: int
    checksum: str


@dataclass(frozen=True)
class Metadata:
    """What metadata.json says; it is written last, so a folder that has it was whole once.

    nothing_before: as the rank began to write it, no step of the job had ever been saved whole. If all that
    is there says so, no step is whole, and of none is noted that it was (WHOLE_NOTE), the job's first save
    was never finished.
    """

    identity: Identity
    kind: Kind
    saver: SaverName
    step: int
    time: float
    files: tuple[FileEntry, ...]
    nothing_before: bool = False

    def to_json(self) -> bytes:
        return with_checksum({"format": FORMAT, **asdict(self)})


@dataclass(frozen=True)
class StateFiles:
    """The names of the files that jitckpt itself writes into a save."""

    tensors: str
    document: str


def state_files(saver: SaverName) -> StateFiles:
    """Return the names; beside the files of a user's save function they are others, so as not to collide."""
    if saver == "callback":
        return StateFiles("host_state.safetensors", "host_state.json")
    return StateFiles(TENSORS_FILE, STATE_FILE)


def step_folder(step: int) -> str:
    return f"step-{step:010d}"


def rank_folder(kind: Kind, rank: int) -> str:
    return f"{kind}-{rank:05d}"


def parse_step_folder(name: str) -> int | None:
    """Return the step whose folder is called `name`, None for any other name."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and name.isascii() and step_folder(int(found[1])) == name else None


def parse_rank_folder(name: str) -> tuple[Kind, int] | None:
    """Return the kind and the rank whose folder is called `name`, None for any other name."""
    found = _RANK.fullmatch(name)
    if not found or not name.isascii():
        return None
    kind: Kind = "rank" if found[1] == "rank" else "local"
    return (kind, int(found[2])) if rank_folder(kind, int(found[2])) == name else None


def with_checksum(document: dict[str, Any]) -> bytes:
    """Return a metadata document as JSON whose last entry is the checksum of all before it."""
    content = json.dumps(document, indent=1).encode().removesuffix(b"\n}")
    return content + _OWN_CHECKSUM + _quoted_checksum(content) + b"\n}"


def parse_metadata(data: bytes) -> Metadata:
    """Return what a metadata.json holds; SaveError for anything that jitckpt does not write."""
    content = parse_object(data, METADATA_FILE)
    version = content.get("format")
    if type(version) is not int or version != FORMAT:
        raise SaveError(f"{METADATA_FILE} has format {version!r:.40}; this jitckpt reads format {FORMAT}.")
    before, _, own = data.rpartition(_OWN_CHECKSUM)
    if own != _quoted_checksum(before) + b"\n}":
        raise SaveError(f"{METADATA_FILE} is damaged: its checksum is not that of its content.")
    entry = _Entry(content, METADATA_FILE)
    identity = _Entry(entry.value("identity", dict), f"{METADATA_FILE}: identity")
    kind, saver = entry.value("kind", str), entry.value("saver", str)
    if kind not in ("rank", "local") or saver not in SAVERS:
        raise SaveError(f"{METADATA_FILE} is of the unknown kind {kind!r:.40} by {saver!r:.40}.")
    result = Metadata(
        identity=Identity(
            job=identity.value("job", str),
            fingerprint=identity.value("fingerprint", str),
            world_size=identity.count("world_size"),
            rank=identity.count("rank"),
            shard=identity.count("shard"),
            shards=identity.count("shards"),
            layout=identity.value("layout", str),
            start=identity.count("start") if "start" in identity.content else 0,
        ),
        kind="rank" if kind == "rank" else "local",
        saver=saver,
        step=entry.count("step"),
        time=entry.value("time", float),
        files=tuple(_file_entry(item) for item in entry.value("files", list)),
        nothing_before=entry.value("nothing_before", bool) if "nothing_before" in content else False,
    )
    if result.identity.shard >= result.identity.shards or result.identity.rank >= result.identity.world_size:
        raise SaveError(f"{METADATA_FILE} has a rank or shard beyond the number of them.")
    if len({file.name for file in result.files}) != len(result.files):
        raise SaveError(f"{METADATA_FILE} lists a file twice.")
    if not 0 <= result.time < _END_OF_TIME:
        raise SaveError(f"{METADATA_FILE} is damaged: time is {result.time!r}.")
    return result


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """Return the JSON object in `data`; SaveError, which begins with `what`, for anything else."""
    try:
        content = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise SaveError(f"{what} is damaged: it is not JSON ({error}).") from error
    if not isinstance(content, dict):
        raise SaveError(f"{what} is damaged: it is not a JSON object.")
    return content


def _file_entry(item: object) -> FileEntry:
    if not isinstance(item, dict):
        raise SaveError(f"{METADATA_FILE} is damaged: a file's entry is no object.")
    entry = _Entry(item, f"{METADATA_FILE}: files")
    name, checksum = entry.value("name", str), entry.value("checksum", str)
    parts = name.split("/")
    odd = "\0" in name or name == METADATA_FILE or any(part in ("", ".", "..") for part in parts)
    if odd or not _can_be_a_path(name):
        raise SaveError(f"{METADATA_FILE} names the file {name!r:.80}, which is no path inside the save.")
    if not _CHECKSUM.fullmatch(checksum):
        raise SaveError(f"{METADATA_FILE} has {checksum!r:.40} where a checksum belongs.")
    return FileEntry(name, entry.count("size"), checksum)


@dataclass(frozen=True)
class _Entry:
    content: dict[str, Any]
    what: str

    def value(self, name: str, kind: type) -> Any:
        value = self.content.get(name)
        if type(value) is not kind:
            raise SaveError(f"{self.what} is damaged: {name} is {value!r:.40}.")
        return value

    def count(self, name: str) -> int:
        value: int = self.value(name, int)
        if not 0 <= value < 1 << 63:
            raise SaveError(f"{self.what} is damaged: {name} is {value:#x}.")
        return value


def _can_be_a_path(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _quoted_checksum(content: bytes) -> bytes:
    return f'"{xxhash.xxh3_128_hexdigest(content)}"'.encode()


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")
