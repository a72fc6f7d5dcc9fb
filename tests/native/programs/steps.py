"""Step markers: what the device has finished, back-pressure, and a save ordered inside an optimizer step."""

import ctypes
import struct
from typing import Any

from harness import Blocker, HostThread, Job, check, device, finish, malloc, new_stream, progress, wait_for

SIZE = ctypes.c_size_t(64)


def begin(step: int, stream: Any) -> None:
    check(device.jitckpt_step_begin(ctypes.c_uint64(step), stream))


def end(step: int, stream: Any) -> None:
    check(device.jitckpt_step_end(ctypes.c_uint64(step), stream))


def numbers() -> list[int]:
    seen = progress()
    return [seen.host_begun, seen.host_ended, seen.device_begun, seen.device_ended, seen.queued]


def main() -> None:
    stream, buffer, host = new_stream(), malloc(64), HostThread()
    in_save: list[Any] = []

    def save(_: dict[str, Any]) -> None:
        wait_for(lambda: bool(progress().step_thread_parked))
        in_save.append(numbers())

    job = Job(save, max_ahead=3)
    device.jitckpt_set_base(ctypes.c_uint64(10))
    results: dict[str, Any] = {"base": numbers()}

    blocker = Blocker(stream)
    for step in (11, 12, 13):
        begin(step, stream)
        end(step, stream)
    results["ahead"] = numbers()

    # The fourth step has to wait for the device, without keeping the GIL.
    host.call(lambda: begin(14, stream))
    results["waits"] = host.done == 0 and numbers() == results["ahead"]
    blocker.release()
    wait_for(lambda: host.done == 1)
    wait_for(lambda: numbers() == [14, 13, 14, 13, 0])

    # The host is inside step 14: it may finish the step, and only then it is held.
    job.order_save()
    wait_for(lambda: bool(progress().holding))
    host.call(lambda: check(device.cudaMemsetAsync(buffer, 1, SIZE, stream)))
    wait_for(lambda: host.done == 2)
    results["save_waits_for_the_step"] = in_save == []
    host.call(lambda: end(14, stream))
    wait_for(lambda: host.done == 3)
    host.call(lambda: begin(15, stream))
    held = job.hear("held")
    wait_for(lambda: bool(in_save))
    results["parked"] = host.done == 3
    job.order_resume()
    wait_for(lambda: host.done == 4)

    word = ctypes.c_uint64(0)
    check(device.cudaHostRegister(ctypes.byref(word), ctypes.c_size_t(8), 0))
    blocker = Blocker(stream)
    check(device.jitckpt_write_word(ctypes.byref(word), ctypes.c_uint64(2**63 + 5), stream))
    results["word_before"] = word.value
    blocker.release()
    check(device.cudaStreamSynchronize(stream))
    results["word_after"] = word.value

    area = (ctypes.c_uint8 * (16 + SIZE.value))()
    check(device.cudaHostRegister(area, ctypes.c_size_t(len(area)), 0))
    check(device.cudaMemsetAsync(buffer, 7, SIZE, stream))
    blocker = Blocker(stream)
    target = ctypes.byref(area, 16)
    check(device.jitckpt_write_area(area, ctypes.c_uint64(2**63 + 6), target, buffer, SIZE, stream))
    results["area_before"] = sorted(set(area))
    blocker.release()
    check(device.cudaStreamSynchronize(stream))
    results["area_after"] = [struct.unpack("QQ", bytes(area[:16])), sorted(set(area[16:]))]
    finish(held=held, in_save=in_save[0], **results)


main()
