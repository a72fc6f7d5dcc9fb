"""A rehearsed failure: the signal comes right after the next NCCL call, or the end of its group."""

import signal
import sys
from typing import Any

from harness import Job, all_reduce, check, communicators, device, finish, malloc, new_stream

COUNT = 64


def main() -> None:
    first, second = communicators(2)
    sides: list[Any] = []
    for index, communicator in enumerate((first, second)):
        check(device.cudaSetDevice(index))
        sides.append((communicator, malloc(4 * COUNT), COUNT, new_stream()))
    caught: list[str] = []
    place = ["before"]
    signal.signal(signal.SIGUSR2, lambda *_: caught.append(place[0]))
    Job(lambda _: None)
    device.jitckpt_arm_fault(signal.SIGUSR2)
    place[0] = "memset"
    check(device.cudaMemset(sides[1][1], 0, 4))
    if sys.argv[1] == "group":
        check(device.ncclGroupStart())
        place[0] = "inside the group"
        for index in (0, 1):
            check(device.cudaSetDevice(index))
            check(all_reduce(*sides[index]))
        place[0] = "end of the group"
        check(device.ncclGroupEnd())
    else:
        place[0] = "first call"
        check(device.cudaSetDevice(0))
        check(all_reduce(*sides[0]))
        place[0] = "second call"
        check(device.cudaSetDevice(1))
        check(all_reduce(*sides[1]))
    place[0] = "after"
    for index in (0, 1):
        check(device.cudaSetDevice(index))
        check(device.cudaStreamSynchronize(sides[index][3]))
    finish(caught=caught)


main()
