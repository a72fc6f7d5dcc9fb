"""NCCL's own account of a job, as its tool `ncclras` asks for it."""

import socket

import pytest
from nccl_ras_server import STATUS, nccl_ras_server

from jitckpt.system.nccl_ras import ADDRESS, ENABLED, MOST_BYTES, Question, RasError, ask


def answer(address: str, enabled: str = "1") -> str:
    question = Question({ADDRESS: address, ENABLED: enabled})
    question.start()
    question.join()
    return question.answer


def test_what_nccl_says_is_told_whole() -> None:
    with nccl_ras_server() as address:
        assert answer(address) == STATUS


def test_who_is_not_nccl_is_asked_for_nothing() -> None:
    with nccl_ras_server(hello=b"220 mail.example.org ESMTP\n") as address:
        assert "who listens there is not NCCL: '220 mail" in answer(address)


def test_who_is_silent_does_not_hold_anybody_up() -> None:
    with nccl_ras_server(hello=b"") as address, pytest.raises(TimeoutError):
        ask(address, limit=0.2)


def test_who_never_ends_is_left() -> None:
    with nccl_ras_server(status=bytes(2 * MOST_BYTES)) as address, pytest.raises(RasError, match="more than"):
        ask(address)


def test_nobody_is_asked_where_nobody_listens_or_it_is_switched_off() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert answer(f"127.0.0.1:{port}") == ""
    assert answer("nonsense", enabled="0") == ""
    assert "gave no answer" in answer("nonsense")
