"""Numbers of descriptors in the environment: only the agent's own are used, by one process of the rank."""

import json
import multiprocessing
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitckpt.ring import local_state
from jitckpt.system import descriptors
from jitckpt.system.descriptors import AGENT, COPIES, LIFELINE, PROOF, STATE, GivenDescriptors, NotOursError
from jitckpt.system.lifeline import Lifeline

Environment = dict[str, str]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    """A worker's, of rank 3."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, state = Lifeline(), local_state.create()
    numbers = {AGENT: theirs.fileno(), STATE: state, LIFELINE: lifeline.descriptor}
    variables = {name: str(number) for name, number in numbers.items()}
    proof = json.loads(descriptors.proof(3, numbers))
    variables[PROOF] = json.dumps(proof | {"agent": os.getppid()})  # here it would be the same process
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield variables
    ours.close()
    theirs.close()
    os.close(state)
    lifeline.close()


def test_what_the_agent_has_given_is_used(environment: Environment) -> None:
    numbers = [int(environment[name]) for name in (AGENT, STATE, LIFELINE)]
    assert descriptors.given() == GivenDescriptors(3, numbers[0], numbers[1], numbers[2], None)
    assert descriptors.claim(3) == descriptors.given()
    assert not any(os.get_inheritable(number) for number in numbers)
    assert descriptors.claim(3) is not None  # a second job of this process


def test_without_an_agent_there_is_nothing() -> None:
    assert descriptors.given({}) is None


def test_a_file_with_the_number_is_not_touched(environment: Environment, tmp_path: Path) -> None:
    """A program between the two has closed what it inherited; the number is the training's own file now."""
    for name in (AGENT, STATE, LIFELINE):
        file = tmp_path / name
        file.write_bytes(b"x" * 1000)
        with file.open("r+b") as opened:
            changed = environment | {name: str(opened.fileno())}
            with pytest.raises(NotOursError, match="is another file"):
                descriptors.given(changed)
        with pytest.raises(NotOursError, match="Bad file descriptor"):
            descriptors.given(changed)
        assert file.read_bytes() == b"x" * 1000


def test_memory_and_sockets_of_others_are_not_touched(environment: Environment) -> None:
    memory = os.memfd_create("jitckpt-local-state")
    with pytest.raises(NotOursError, match="is another file"):
        descriptors.given(environment | {STATE: str(memory)})
    os.close(memory)
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with pytest.raises(NotOursError, match="is another file"):
        descriptors.given(environment | {AGENT: str(pair[0].fileno())})
    for end in pair:
        end.close()


def test_a_worker_that_was_made_anew_knows_its_new_files(environment: Environment, tmp_path: Path) -> None:
    """CRIU restores it with other sockets of the same agent, and with memory of its own."""
    told = json.loads(environment[PROOF])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline = Lifeline()
    changed = environment | {AGENT: str(theirs.fileno()), LIFELINE: str(lifeline.descriptor)}
    with pytest.raises(NotOursError, match="is another file"):
        descriptors.given(changed)
    changed[PROOF] = json.dumps(told | {"agent": os.getpid()})
    found = descriptors.given(changed)
    assert found is not None
    assert (found.agent, found.lifeline) == (theirs.fileno(), lifeline.descriptor)
    with (tmp_path / "file").open("w") as file, pytest.raises(NotOursError, match="no memory of jitckpt's"):
        descriptors.given(changed | {STATE: str(file.fileno())})
    stream = socket.socketpair()
    with pytest.raises(NotOursError, match="is another socket"):
        descriptors.given(changed | {AGENT: str(stream[0].fileno())})
    lifeline.close()
    for end in (ours, theirs, *stream):
        end.close()


def test_a_worker_that_has_moved_to_another_host_knows_the_agent_there(environment: Environment) -> None:
    """It was made by an agent of another number; that one here is what this process has come from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    changed = environment | {AGENT: str(theirs.fileno())}
    child = os.fork()
    if child == 0:  # the socket's maker is its parent
        os._exit(0 if descriptors.given(changed) is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
    for end in (ours, theirs):
        end.close()


@pytest.mark.parametrize("told", ["", "{}", "[]", "{", '{"rank": 3}', '{"rank": "x"}'])
def test_numbers_without_proof_are_not_used(environment: Environment, told: str) -> None:
    with pytest.raises(NotOursError):
        descriptors.given(environment | {PROOF: told})


def test_what_an_agent_around_this_one_has_given_does_not_count(environment: Environment) -> None:
    assert descriptors.given(environment | {COPIES: "0"}) == descriptors.given()


def test_another_rank_is_not_this_one(environment: Environment) -> None:
    with pytest.raises(NotOursError, match="This process is rank 1, and was started as rank 3"):
        descriptors.claim(1)


def claim_in_child(answers: "multiprocessing.connection.Connection[str, str]") -> None:
    try:
        descriptors.claim(3)
        answers.send("claimed")
    except NotOursError as error:
        answers.send(str(error))


@pytest.mark.parametrize(
    "context", [multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")]
)
def test_ranks_that_the_training_starts_do_not_use_it(
    environment: Environment,
    context: "multiprocessing.context.ForkContext | multiprocessing.context.SpawnContext",
) -> None:
    ours, theirs = context.Pipe()
    process = context.Process(target=claim_in_child, args=(theirs,))
    process.start()
    assert "was not started by jitckpt's agent" in ours.recv()
    process.join()


def test_a_forked_process_does_not_use_what_its_parent_uses(environment: Environment) -> None:
    assert descriptors.claim(3) is not None
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            descriptors.claim(3)
        except NotOursError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    with open(read) as told:
        assert "Another process of rank 3" in told.read()
