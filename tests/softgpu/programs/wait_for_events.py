"""Which of torch's ways to have a stream wait for an event of another one do so."""

from typing import Any

import torch

EDGE, PRODUCTS = 1200, 6  # for long enough


def waits(current: torch.Stream, kind: type[Any]) -> bool:
    """Have `current` wait for work of another stream; return whether it does."""
    matrix = torch.ones(EDGE, EDGE, device="cuda")
    torch.cuda.synchronize()
    other, event = torch.cuda.Stream(), kind()
    with torch.cuda.stream(other):
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
    event.record(other)
    current.wait_event(event)
    is_idle = current.query()
    assert not event.query(), "the other stream was too fast to tell"
    torch.cuda.synchronize()
    return not is_idle


if __name__ == "__main__":
    of_cuda, of_any = torch.cuda.current_stream(), torch.accelerator.current_stream()
    print("torch.cuda's stream and event", waits(of_cuda, torch.cuda.Event))
    print("any device's stream and event", waits(of_any, torch.Event))
    print("any device's stream, torch.cuda's event", waits(of_any, torch.cuda.Event))
