"""What torch does beyond a training step, through the proxy: pinned memory, streams, threads, forks."""

import multiprocessing
import threading

import pytest
import torch


def needs_the_device(answers: "multiprocessing.queues.Queue[str]") -> None:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        answers.put(str(error))


def copies_and_streams() -> None:
    pinned = torch.randn(1_000_003).pin_memory()
    assert pinned.is_pinned()
    there = pinned.to("cuda", non_blocking=True)
    back = torch.empty_like(pinned, pin_memory=True)
    back.copy_(there, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, pinned)
    assert torch.equal(there.cpu(), pinned)

    side, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        doubled = there * 2
        event.record()
    torch.cuda.current_stream().wait_event(event)
    assert torch.equal((doubled - there).cpu(), pinned)
    event.synchronize()
    assert event.query()


def main() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_properties(0).name == "SoftGPU"

    numbers = torch.arange(100.0, device="cuda")
    assert torch.nonzero(numbers > 97).flatten().tolist() == [98, 99]
    assert numbers.to("cpu").sum().item() == 4950

    copies_and_streams()

    sums: list[float] = [0.0] * 4

    def add(place: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            total = torch.zeros(1, device="cuda")
            for term in range(100):
                total += term
            sums[place] = total.item()

    threads = [threading.Thread(target=add, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [4950.0] * 4

    refused = pytest.raises(RuntimeError, match="operation failed due to a previous error during capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.cuda.synchronize()

    context = multiprocessing.get_context("fork")
    answers: multiprocessing.queues.Queue[str] = context.Queue()
    child = context.Process(target=needs_the_device, args=(answers,))
    child.start()
    assert "forked" in answers.get(timeout=60)
    child.join()
    assert numbers.sum().item() == 4950

    # Last, as it ends the device: a failure inside a kernel reaches the program with its words.
    with pytest.raises(RuntimeError, match="index 100 is out of bounds"):
        numbers[torch.tensor([100], device="cuda")].sum().item()


if __name__ == "__main__":
    main()
