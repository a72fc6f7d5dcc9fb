"""What NCCL's RAS service says to `ncclras`, for tests: NCCL itself runs on GPUs alone."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STATUS = "Communicators... (0.00s)\nErrors\n=====\n#0-0 (27a079b828ff1a75) MISMATCH\n"


@contextmanager
def nccl_ras_server(hello: bytes = b"SERVER PROTOCOL 2\n", status: bytes = STATUS.encode()) -> Iterator[str]:
    """Give the address where one visitor after the other is answered; none without a hello."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = threading.Event()

        def visit(visitor: socket.socket) -> None:
            reader = visitor.makefile("rb")
            if not hello:
                end.wait()
            assert reader.readline().startswith(b"CLIENT PROTOCOL ")
            visitor.sendall(hello)
            if reader.readline().startswith(b"TIMEOUT "):
                visitor.sendall(b"OK\n")
                assert reader.readline() == b"VERBOSE STATUS\n"
                visitor.sendall(status)

        def serve() -> None:
            while True:
                visitor, _ = server.accept()
                with visitor:
                    if end.is_set():
                        return
                    visit(visitor)

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = server.getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            end.set()
            socket.create_connection((host, port)).close()
            thread.join()
