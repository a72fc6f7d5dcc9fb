import os
import sys

from jitckpt.system.stacks import ask_for_stacks, read_stacks, stack_writer


def test_the_stacks_are_those_of_now() -> None:
    writer = stack_writer()
    for _ in range(2):
        text = read_stacks(ask_for_stacks(os.getpid(), writer.signal_number, writer.descriptor))
        assert "test_the_stacks_are_those_of_now" in text
        assert text.count("most recent call first") == len(sys._current_frames())
