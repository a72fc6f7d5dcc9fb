"""Passes tensors or an event on the device to another process with torch.multiprocessing."""

import ctypes
import threading

import torch
from torch import multiprocessing
from torch.multiprocessing import Queue


def serve(tasks: "Queue[object]", answers: "Queue[object]") -> None:
    """Doubles each tensor that comes, in place, and answers its sum from before."""
    while True:
        tensor = tasks.get()
        if tensor is None:
            return
        assert isinstance(tensor, torch.Tensor)
        total = tensor.sum().item()
        tensor.mul_(2)
        torch.cuda.synchronize()
        answers.put(total)
        del tensor


def wait_for_event(handle: bytes, tensor: torch.Tensor, answers: "Queue[object]") -> None:
    """Answers what the tensor holds once the other process's event has happened."""
    event = torch.cuda.Event.from_ipc_handle(torch.device("cuda", 0), handle)
    answers.put("opened")
    event.wait()
    answers.put(tensor.tolist())


def share_memory() -> None:
    """The consumer sees what is queued on the producer's stream, the producer what the consumer wrote."""
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    consumer = context.Process(target=serve, args=(tasks, answers))
    consumer.start()
    whole = torch.arange(1000.0, device="cuda")
    for tensor in (
        whole,
        whole[100:200],
        torch.nn.Parameter(torch.ones(5, device="cuda"), requires_grad=False),
    ):
        expected = tensor.sum().item()
        tasks.put(tensor)
        assert answers.get(timeout=60) == expected
        assert tensor.sum().item() == 2 * expected
    sent = torch.ones(1 << 22, device="cuda")  # an allocation of its own
    tasks.put(sent)
    assert answers.get(timeout=60) == 1 << 22
    tasks.put(None)
    consumer.join(60)
    assert consumer.exitcode == 0
    del sent
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() < 1 << 16, "what the consumer has released is freed"


def share_event() -> None:
    """The consumer's stream waits for an event of the producer's stream, which is held up."""
    released = threading.Event()
    wait = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: released.wait())
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    tensor = torch.zeros(4, device="cuda")
    event = torch.cuda.Event(interprocess=True)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    consumer = context.Process(target=wait_for_event, args=(event.ipc_handle(), tensor, answers))
    with torch.cuda.stream(stream):
        assert ctypes.CDLL(None).cudaLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), wait, None) == 0
        tensor.fill_(7)
        event.record()
    consumer.start()
    assert answers.get(timeout=60) == "opened"
    assert not event.query()
    released.set()
    assert answers.get(timeout=60) == [7.0] * 4
    consumer.join(60)
    assert consumer.exitcode == 0


def die_while_sharing() -> None:
    """A consumer that is killed takes nothing with it; what it held stays the producer's."""
    context = multiprocessing.get_context("spawn")
    tasks, answers = context.Queue(), context.Queue()
    consumer = context.Process(target=serve, args=(tasks, answers))
    consumer.start()
    tensor = torch.ones(8, device="cuda")
    tasks.put(tensor)
    assert answers.get(timeout=60) == 8
    consumer.kill()
    consumer.join(60)
    assert tensor.sum().item() == 16


if __name__ == "__main__":
    share_memory()
    share_event()
    die_while_sharing()
    print("shared")
