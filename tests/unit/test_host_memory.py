"""The memory tier in one host's memory: whole or not there, whatever is written when."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.errors import SaveError
from jitckpt.saves.layout import Identity
from jitckpt.tiers import chunks, host_memory, shard
from jitckpt.tiers.chunks import Window
from jitckpt.tiers.host_memory import HostMemory
from jitckpt.tiers.own_shard import OwnShard
from jitckpt.tiers.tier import Shard

IDENTITY = Identity("job", "fingerprint", 2, 1, 1, 2)


def made(step: int, data: bytes, *, identity: Identity = IDENTITY, slot: int | None = None) -> Shard:
    """Return a shard whose data are one tensor of bytes, and a small one that was on the host."""
    place = shard.aligned(len(data))
    whole = data + bytes(place - len(data)) + step.to_bytes(16, "little")
    cut = [whole[begin : begin + shard.CHUNK] for begin in range(0, len(whole), shard.CHUNK)]
    index = shard.Index(
        identity=identity,
        step=step,
        timeline="first",
        time=1.0,
        checksums=[xxhash.xxh3_128_hexdigest(chunk) for chunk in cut],
        tensors={"big": ("uint8", [len(data)], 0), "small": ("int64", [2], place)},
        host_from=place,
        document={"step": step},
    ).encode()
    slot = step % 2 if slot is None else slot
    return Shard(identity.rank, slot, shard.seal_of(index, step, len(whole)), index, window_of(whole))


def window_of(data: bytes) -> Window:
    """Return bytes as a shard's data."""
    descriptor = host_memory.create()
    host_memory.write(descriptor, data, host_memory.PAGE)
    window = chunks.window(descriptor, host_memory.PAGE, len(data))
    os.close(descriptor)
    return window


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    found = HostMemory()
    yield found
    found.close()


def test_what_is_put_in_comes_out_again(memory: HostMemory) -> None:
    data = os.urandom(shard.CHUNK + 12345)
    memory.put(made(7, data))
    assert [(held.rank, held.step, held.timeline) for held in memory.has()] == [(1, 7, "first")]
    index, state = host_memory.read(memory.of(1), 7)
    assert state.document == {"step": 7}
    assert state.tensors["big"].numpy().tobytes() == data
    assert state.tensors["small"].tolist() == [7, 0]
    other = HostMemory()
    assert memory.get(1, 7, "first", other) == memory.has()[0].bytes
    assert other.has() == memory.has()
    other.close()
    memory.drop(1, 7)
    assert memory.has() == []
    assert index.identity == IDENTITY


def test_the_older_step_stays_while_the_newer_one_comes(memory: HostMemory) -> None:
    memory.put(made(1, b"one"))
    memory.put(made(2, b"two"))
    coming = made(3, bytes(3 * shard.CHUNK))

    context = memory.coming(1, coming.slot, coming.seal, coming.index)
    _, window = context.__enter__()
    memoryview(window)[:8] = b"halfways"
    assert [held.step for held in memory.has()] == [2]
    died = SaveError("the host that sends it has died")
    assert not context.__exit__(SaveError, died, None)
    assert [held.step for held in memory.has()] == [2]
    with pytest.raises(SaveError, match="another number of chunks"):
        memory.put(Shard(1, coming.slot, coming.seal, coming.index, window_of(b"short")))
    assert [held.step for held in memory.has()] == [2]


@given(st.integers(0, 2**16), st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_found(place: int, flip: int) -> None:
    memory = HostMemory()
    one = made(5, bytes(1000))
    memory.put(one)
    descriptor = memory.of(1)
    used = [*range(shard.SEAL_BYTES)]
    used += [host_memory.data_place(one.slot) - host_memory.place(one.slot) + at for at in range(1024)]
    index_at = host_memory.data_place(one.slot) + 1024 - host_memory.place(one.slot)
    used += [index_at + at for at in range(one.seal.index_bytes)]
    where = host_memory.place(one.slot) + used[place % len(used)]
    (before,) = os.pread(descriptor, 1, where)
    os.pwrite(descriptor, bytes([before ^ flip]), where)
    own = OwnShard(descriptor, IDENTITY)
    assert own.offer() == () or not own.check(5)
    with pytest.raises(SaveError):
        host_memory.check(descriptor, 5)
    with pytest.raises(SaveError):
        memory.get(1, 5, "first", HostMemory())
    memory.close()


def test_what_can_only_be_read_is_checked(memory: HostMemory) -> None:
    memory.put(made(4, b"x"))
    reading = os.open(f"/proc/self/fd/{memory.of(1)}", os.O_RDONLY)
    try:
        assert host_memory.check(reading, 4).step == 4
    finally:
        os.close(reading)


def test_damaged_chunks_are_not_taken_in(memory: HostMemory) -> None:
    one = made(4, bytes(100))
    with pytest.raises(SaveError, match="Chunk 0 of step 4 of rank 1 is damaged"):
        memory.put(Shard(1, one.slot, one.seal, one.index, window_of(b"\1" * one.seal.data_bytes)))
    assert memory.has() == []


def test_a_shard_of_another_rank_or_job_is_refused(memory: HostMemory) -> None:
    one = made(4, b"")
    with pytest.raises(SaveError, match="A shard of rank 1 came as that of rank 0"):
        memory.put(Shard(0, one.slot, one.seal, one.index, one.window))
    memory.put(one)
    for identity, why in (
        (Identity("other", "fingerprint", 2, 1, 1, 2), "of another job"),
        (Identity("job", "fingerprint", 4, 1, 1, 2), "of a job with 2 ranks; this one has 4"),
        (Identity("job", "changed", 2, 1, 1, 2), "of another model or optimizer"),
    ):
        own = OwnShard(memory.of(1), identity)
        assert own.offer() == ()
        assert why in own.reasons[0]
        assert own.newest == (4 if identity.job == "job" else 0)


def test_more_than_the_limit_is_refused_with_what_would_be_needed(memory: HostMemory) -> None:
    memory.limit = 100_000
    memory.put(made(1, bytes(20_000)))
    with pytest.raises(SaveError, match=r"would need \d+ bytes of memory in all, and may use 100000"):
        memory.put(made(2, bytes(60_000)))


def test_memory_is_counted_while_another_ranks_state_comes(
    memory: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.put(made(4, b"state"))
    looked = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        memory.of(0)  # as another thread does
        return looked(descriptor)

    monkeypatch.setattr(os, "fstat", fstat)
    assert memory.taken() > 0


def test_nonsense_is_no_index() -> None:
    for content in (b"", b"{}", b"[1]", b'{"identity": 3}', b'{"identity": {"job": "x"}}'):
        seal = shard.seal_of(content, 3, 0)
        with pytest.raises(SaveError):
            shard.parse_index(content, seal)


def test_a_tensor_outside_of_the_data_is_refused() -> None:
    one = made(3, bytes(64))
    index = one.index.replace(b'["int64",[2],64]', b'["int64",[2],80]')
    assert index != one.index
    with pytest.raises(SaveError, match="outside of the data"):
        shard.parse_index(index, shard.seal_of(index, 3, one.seal.data_bytes))


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from test_host_memory import made
from jitckpt.tiers.host_memory import HostMemory
memory = HostMemory({1: int(sys.argv[1])})
for step in range(1, 10**6):
    memory.put(made(step, step.to_bytes(8, "little") * 40_000))
"""


def test_a_writer_that_is_killed_at_any_moment_leaves_a_whole_step() -> None:
    for pause in (0.0, 0.001, 0.003, 0.007, 0.011):
        descriptor = host_memory.create()
        command = [sys.executable, "-c", WRITER, str(descriptor), os.path.dirname(__file__)]
        with subprocess.Popen(command, pass_fds=[descriptor]) as writer:
            while sum(1 for _ in host_memory.found(descriptor)) < 2:
                time.sleep(0.001)
            time.sleep(pause)
            writer.send_signal(signal.SIGKILL)
        whole = [seal.step for _, seal in host_memory.found(descriptor)]
        assert whole
        for step in whole:
            _, state = host_memory.read(descriptor, step)
            numbers = state.tensors["big"].view(torch.int64)
            assert numbers.unique().tolist() == [step]
        os.close(descriptor)


def test_the_last_of_a_hosts_memory_is_not_taken(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was measured before the ranks began, who have taken theirs since."""
    size = 1 << 20
    memory.put(made(1, bytes(size)))
    monkeypatch.setattr(host_memory, "free_memory", lambda: 0)
    memory.put(made(3, bytes(size)))  # in the same slot, which has its memory
    before = memory.taken()
    with pytest.raises(SaveError, match=r"needs 10\d{5} bytes more of this host's memory, and may take 0 of"):
        memory.put(made(4, bytes(size)))
    assert memory.taken() <= before + host_memory.PAGE  # of its seal, which is none
    assert [one.step for one in memory.has()] == [3]
    host_memory.reserve(memory.of(1), 1, size // 2)  # is there
