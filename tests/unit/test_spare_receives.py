"""What a spare hears from its agent."""

import socket

from jitckpt.worker import spare


def test_an_agent_that_was_killed_with_an_unread_message_is_an_agent_that_has_ended() -> None:
    theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"{}")
        theirs.close()
        assert spare._heard(ours) is None
