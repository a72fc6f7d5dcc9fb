"""What a step costs with each rank's shard in the memory of two hosts, by jitckpt and by other tools.

    pip install --target DIR --no-deps lm-resiliency nvidia-resiliency-ext defusedxml nvidia-ml-py \\
        psutil pyyaml
    sudo env PATH="$PATH" python scripts/bench/other_tools.py --packages DIR
        [--windows 12] [--steps 20] [--megabits N] [--json]

One training under FSDP2 full shard (6.3 million parameters), a rank on each of two hosts, network namespaces
of this machine; softgpu and the launcher are the same for all. In the running job windows of steps have a
snapshot after each step, and none, by turns. The tools take turns, in an order of chance.
"""

import argparse
import json
import os
import random
import statistics
from pathlib import Path

from memory_tier import step_ratio

TRAINING = Path(__file__).parent / "other_tools_training.py"
PAUSE = 0.3  # seconds of a step in which a device would compute
OPTIONS = {
    "jitckpt": ["--memory-tier", "peer"],
    "lm-resiliency": ["--memory-tier", "off"],
    "nvrx": ["--memory-tier", "off"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", required=True, help="where the other tools are installed")
    parser.add_argument("--runs", type=int, default=1, help="of each tool (default 1)")
    parser.add_argument("--windows", type=int, default=12, help="of steps, an even number (default 12)")
    parser.add_argument("--steps", type=int, default=20, help="of a window (default 20)")
    parser.add_argument("--megabits", type=int, help="a second, of the link (default: as fast as it goes)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    environment = {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{args.packages}".lstrip(":")}
    environment["GLOO_SOCKET_IFNAME"] = "cable"  # lm-resiliency sends by gloo
    bits = None if args.megabits is None else 1_000_000 * args.megabits
    found: dict[str, list[dict[str, float]]] = {tool: [] for tool in OPTIONS}
    for _ in range(args.runs):
        for tool in random.sample([*OPTIONS], len(OPTIONS)):
            training = [str(TRAINING), tool, str(args.windows), str(args.steps), str(PAUSE)]
            found[tool].append(step_ratio(OPTIONS[tool], training, bits, environment))
    if args.json:
        print(json.dumps(found))
        return
    for tool, runs in found.items():
        with_it, without, ratio = (
            statistics.median(run[name] for run in runs) for name in ("with", "without", "ratio")
        )
        print(
            f"{tool:13} {1e3 * with_it:7.1f} ms with, {1e3 * without:7.1f} ms without: {ratio:.3f} "
            f"({args.runs} runs of {args.windows // 2} pairs of windows of {args.steps} steps)"
        )


if __name__ == "__main__":
    main()
