"""Whether zstd makes a snapshot's way to another host shorter: ratio and speed on real states, by links.

    python scripts/bench/compression.py [--steps 60] [--pairs 5] [--json]

The example GPT is trained on the CPU; its parameters and AdamW's moments are compressed as they are at first
and after the steps: in float32, and as bfloat16 with float32 masters. Of chunks that are compressed as others
are sent the way takes the longest of compressing, sending and taking apart. Medians of the pairs; needs the
package zstandard.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
import zstandard
from gpt_states import states_of_steps

LEVELS = (-5, 1, 3)
CHUNK = 1 << 20  # bytes, as the tier sends them
LINKS = {"1 Gbit/s": 125e6, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}  # bytes a second


def states(steps: int) -> dict[str, bytes]:
    """Return states of a training, by names: what a rank's snapshot holds, one behind the other."""
    found = {}
    for step, groups in enumerate(states_of_steps(steps)):
        if step in (0, steps - 1):
            whole = b"".join(one.numpy().tobytes() for group in groups for one in group)
            half = b"".join(group[0].bfloat16().view(torch.int16).numpy().tobytes() for group in groups)
            found[f"float32, step {step + 1}"] = whole
            found[f"bfloat16 with masters, step {step + 1}"] = half + whole
    return found


def measure(state: bytes, level: int, pairs: int) -> dict[str, float]:
    """Return the ratio, and bytes a second that one core compresses and takes apart."""
    chunks = [state[at : at + CHUNK] for at in range(0, len(state), CHUNK)]
    forth, back = [], []
    packed: list[bytes] = []
    for _ in range(pairs):
        compressor, decompressor = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        began = time.perf_counter()
        packed = [compressor.compress(chunk) for chunk in chunks]
        between = time.perf_counter()
        again = [decompressor.decompress(one) for one in packed]
        back.append(len(state) / (time.perf_counter() - between))
        forth.append(len(state) / (between - began))
        if again != chunks:
            raise SystemExit("The state did not come back.")
    return {
        "ratio": len(state) / sum(map(len, packed)),
        "compress": statistics.median(forth),
        "decompress": statistics.median(back),
    }


def times_as_long(of: dict[str, float], link: float) -> float:
    """Return how long the way takes with zstd, over without: chunks are compressed as others are sent."""
    slowest = max(1 / (link * of["ratio"]), 1 / of["compress"], 1 / of["decompress"])
    return slowest * link


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of the training (default 60)")
    parser.add_argument("--pairs", type=int, default=5, help="there and back (default 5)")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for name, state in states(parsed.steps).items():
        for level in LEVELS:
            of = measure(state, level, parsed.pairs)
            links = {link: times_as_long(of, speed) for link, speed in LINKS.items()}
            rows.append({"state": name, "bytes": len(state), "level": level, **of, "over_none": links})
    if parsed.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'state':<34} level  ratio  MB/s out  MB/s in  " + "  ".join(f"{one:>10}" for one in LINKS))
    for row in rows:
        links_text = "  ".join(f"{one:>9.2f}x" for one in row["over_none"].values())
        print(
            f"{row['state']:<34} {row['level']:>5}  {row['ratio']:>5.2f}  {row['compress'] / 1e6:>8.0f}  "
            f"{row['decompress'] / 1e6:>7.0f}  {links_text}"
        )


if __name__ == "__main__":
    main()
