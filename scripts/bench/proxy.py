"""What the device proxy costs a call: runs through it and without it in turns, on softgpu.

    scripts/bench/proxy.py BUILD_FOLDER [--runs N]

Prints the median nanoseconds of a launch (nobody waits for it), of a query (answered at once) and of waiting
for a stream that is empty, as the calling thread sees them; and the mean of a launch before which the program
does something else for so many microseconds, in which the other side may go to sleep. Where grpcio is
installed, the same two kinds of call through gRPC over loopback for scale, from Python: a record of 128 bytes
there, 16 bytes back.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

CALLS = ("launch", "query", "synchronize", "launch 30", "launch 100", "launch 300")


def measure(build: Path, program: str, call: str) -> float:
    """Nanoseconds of one call. program: direct_calls or proxied_calls."""
    server = build / "native/proxy/tests/proxy_server_with_softgpu"
    ended = subprocess.run(
        [str(build / "native/proxy/bench" / program), *call.split()],
        env=os.environ | {"JITCKPT_PROXY_SERVER": str(server)},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(ended.stdout)


def serve_rpc(told: Connection) -> None:
    """Answer every call, until the process is ended."""
    import grpc  # type: ignore[import-untyped, unused-ignore]  # it may not be installed

    answer = grpc.unary_unary_rpc_method_handler(lambda request, context: bytes(16))
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("device", {"call": answer})])
    told.send(server.add_insecure_port("127.0.0.1:0"))
    server.start()
    server.wait_for_termination()


def measure_rpc(calls: int = 2000) -> tuple[float, float]:
    """Nanoseconds of a call that nobody waits for, and of one with its answer."""
    import grpc  # type: ignore[import-untyped, unused-ignore]  # it may not be installed

    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve_rpc, args=[there], daemon=True)
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{here.recv()}") as channel:
        call = channel.unary_unary("/device/call")
        record = bytes(128)
        call(record, wait_for_ready=True)
        told, asked = [], []
        for _ in range(calls):
            begun = time.perf_counter_ns()
            call(record)
            asked.append(time.perf_counter_ns() - begun)
        for _ in range(calls):
            begun = time.perf_counter_ns()
            answer = call.future(record)
            told.append(time.perf_counter_ns() - begun)
            answer.result()
    server.terminate()
    server.join()
    return statistics.median(told), statistics.median(asked)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for call in CALLS:
        times: dict[str, list[float]] = {"direct_calls": [], "proxied_calls": []}
        for _ in range(arguments.runs):
            for program, measured in times.items():
                measured.append(measure(build, program, call))
        direct, proxied = (statistics.median(measured) for measured in times.values())
        name, *work = call.split()
        name += f" after {work[0]} us of other work" if work else ""
        print(f"{name}: {direct:.0f} ns without the proxy, {proxied:.0f} ns through it")
    if importlib.util.find_spec("grpc"):
        told, asked = measure_rpc()
        print(f"gRPC: {told:.0f} ns for a call that nobody waits for, {asked:.0f} ns for one with its answer")
    else:
        print("gRPC: not measured, pip install grpcio")


if __name__ == "__main__":
    main()
