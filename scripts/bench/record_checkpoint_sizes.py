"""A trace of real compressed checkpoint sizes, for flush scheduling: the example GPT, trained on the CPU.

    python scripts/bench/record_checkpoint_sizes.py docs/data/gpt-checkpoint-sizes.csv [--steps 150]

After each step the state (parameters and AdamW's moments) is cut into 8 shards of whole tensors, as 8 GPUs
would hold it, and each shard is compressed with zstd. A line a step, bytes of each shard. Then the trace is
scheduled on a DGX-1 by COLLAB's ways and exactly. Needs the package zstandard. Sizes differ a little from
machine to machine (by less than 1 in 1000): sums are made in another order. What this writes is read by
`jitckpt plan reproduce collab-fig6 --trace FILE`.
"""

import argparse
import statistics
from pathlib import Path

import zstandard
from gpt_states import states_of_steps
from torch import Tensor

from jitckpt.planning.papers import flush_times
from jitckpt.planning.topology import dgx1
from jitckpt.planning.traces import Trace, write_trace

SHARDS = 8
LEVEL = 3  # zstd's default


def shards_of(tensors: list[list[Tensor]]) -> list[list[Tensor]]:
    """Parameters with their moments, in order, cut into parts of about equal size."""
    total = sum(tensor.nbytes for group in tensors for tensor in group)
    parts: list[list[Tensor]] = [[] for _ in range(SHARDS)]
    before = 0
    for group in tensors:
        parts[min(SHARDS - 1, before * SHARDS // total)] += group
        before += sum(tensor.nbytes for tensor in group)
    return parts


def record(steps: int) -> Trace:
    trace = []
    for groups in states_of_steps(steps):
        compressor = zstandard.ZstdCompressor(level=LEVEL)
        trace.append(
            tuple(
                float(sum(len(compressor.compress(tensor.numpy().tobytes())) for tensor in shard))
                for shard in shards_of(groups)
            )
        )
    return tuple(trace)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=150, help="(default 150)")
    parsed = parser.parse_args()
    trace = record(parsed.steps)
    write_trace(parsed.output, trace)
    sizes = [size for snapshot in trace for size in snapshot]
    print(f"{len(trace)} snapshots, shards of {min(sizes):.0f} to {max(sizes):.0f} bytes")
    for share in (50, 75, 98):
        free = statistics.quantiles(sizes, n=100)[share - 1]
        times = flush_times(dgx1(), trace, free)
        print(
            f"{free:.0f} bytes free (percentile {share}): over the optimum, median and worst: "
            f"greedy {times.median_percent(times.greedy):.0f} and {times.worst_percent(times.greedy):.0f} %, "
            f"to the host {times.median_percent(times.baseline):.0f} and "
            f"{times.worst_percent(times.baseline):.0f} %"
        )


if __name__ == "__main__":
    main()
