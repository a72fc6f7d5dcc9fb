"""A host that sends slowly is not taken for one that is silent."""

import os
import socket
import struct
import threading
import time

import xxhash

from jitckpt.tiers import chunks, host_memory

PATIENCE = 2.0
PAUSE, PIECES, PIECE = 0.7, 4, 4 << 10


def test_bytes_that_come_are_a_sign_of_life_however_few() -> None:
    """The receiver is woken for much at once; what is less has come before its patience is at an end."""
    data = os.urandom(PIECES * PIECE)
    descriptor = host_memory.create()
    host_memory.reserve(descriptor, 0, len(data))
    window = chunks.window(descriptor, host_memory.data_place(0), len(data))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        receiver.setblocking(False)

        def send() -> None:
            sender.sendall(struct.pack("<II", 0, len(data)))
            for begin in range(0, len(data), PIECE):
                time.sleep(PAUSE)
                sender.sendall(data[begin : begin + PIECE])

        slow = threading.Thread(target=send)
        slow.start()
        chunks.receive(receiver.fileno(), window, [xxhash.xxh3_128_digest(data)], PATIENCE)
        slow.join()
    assert bytes(memoryview(window)) == data
    os.close(descriptor)
