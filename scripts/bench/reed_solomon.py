"""What Reed-Solomon codes by ISA-L would cost and give for two lost hosts, beside copies and XOR parity.

    pip install --no-deps --target DIR pyeclib    # its wheel has ISA-L
    python scripts/bench/reed_solomon.py --packages DIR [--mib 96] [--runs 9] [--json]

A state of `--mib` is cut in D - 2 cells, for which two more are made, and then two cells are made again from
what is left. Beside it, of as many bytes and on the same core: memcpy, and one XOR parity of the cells, by
numpy. What hosts keep, send and read is reckoned, in times a state: in memory for two steps, sent in one,
read for one lost host.
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

LOST = 2
SIZES = (5, 8)  # hosts of a group
BLOCK = 256 << 10  # bytes of each cell at a time, as they come over a connection
Cells = np.ndarray  # of bytes: a row for each


class Isal:
    """ISA-L's calls, over rows of bytes. cells: of a state; with LOST more they can be lost."""

    def __init__(self, library: Path, cells: int) -> None:
        self._calls = ctypes.CDLL(str(library))
        self._cells = cells
        self._matrix = (ctypes.c_ubyte * ((cells + LOST) * cells))()
        self._calls.gf_gen_cauchy1_matrix(self._matrix, cells + LOST, cells)

    def more(self, data: Cells, into: Cells) -> None:
        """Make the cells that are kept beside the data's."""
        self._multiply(bytes(self._matrix)[self._cells**2 :], [*data], into)

    def again(self, data: Cells, more: Cells, into: Cells) -> None:
        """Make the first LOST cells of the data again, from the others."""
        left = [*range(LOST, self._cells), *range(self._cells, self._cells + LOST)]
        rows = bytes(self._matrix)
        chosen = b"".join(rows[one * self._cells : (one + 1) * self._cells] for one in left)
        inverse = (ctypes.c_ubyte * self._cells**2)()
        source = (ctypes.c_ubyte * self._cells**2).from_buffer_copy(chosen)
        if self._calls.gf_invert_matrix(source, inverse, self._cells):
            raise SystemExit("these cells can't be made again")
        self._multiply(bytes(inverse)[: LOST * self._cells], [*data[LOST:], *more], into)

    def _multiply(self, rows: bytes, data: Sequence[Cells], into: Cells) -> None:
        tables = (ctypes.c_ubyte * (32 * self._cells * LOST))()
        of = (ctypes.c_ubyte * len(rows)).from_buffer_copy(rows)
        self._calls.ec_init_tables(self._cells, LOST, of, tables)
        for begin in range(0, into.shape[1], BLOCK):
            size = min(BLOCK, into.shape[1] - begin)
            self._calls.ec_encode_data(
                size, self._cells, LOST, tables, _places(data, begin), _places([*into], begin)
            )


def _places(rows: Sequence[Cells], begin: int) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(rows))(*(one.ctypes.data + begin for one in rows))


def measured(library: Path, hosts: int, size: int, runs: int) -> dict[str, float]:
    """Return the bytes of a state per second of each way, and their ratios to memcpy: medians of pairs."""
    cells = hosts - LOST
    data = np.random.default_rng(0).integers(0, 256, (cells, size // cells), dtype=np.uint8)
    more, back = np.zeros((LOST, data.shape[1]), np.uint8), np.zeros((LOST, data.shape[1]), np.uint8)
    copied, parity = np.empty_like(data), np.zeros(data.shape[1], np.uint8)
    isal = Isal(library, cells)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copied, data),
        "XOR parity": lambda: np.bitwise_xor.reduce(data, axis=0, out=parity),
        "two cells more": lambda: isal.more(data, more),
        "two cells again": lambda: isal.again(data, more, back),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(runs + 1):
        for name, call in ways.items():
            began = time.process_time()
            call()
            times[name].append(time.process_time() - began)
    if not np.array_equal(back, data[:LOST]):
        raise SystemExit("what was made again is not what was lost")
    found = {name: data.nbytes / statistics.median(of[1:]) for name, of in times.items()}
    for name in list(ways)[1:]:
        pairs = zip(times["memcpy"][1:], times[name][1:], strict=True)
        found[f"{name} / memcpy"] = statistics.median(copy / one for copy, one in pairs)
    return found


def reckoned(hosts: int) -> dict[str, Sequence[float]]:
    """Return, times a state: memory for two steps, what is sent in one, what one lost host reads."""
    return {
        "peer=3": (6.0, 2.0, 1.0),
        f"peer=2+parity={hosts}": (2 * (2 + 1 / (hosts - 2)), 2.0, 1.0),
        f"Reed-Solomon, {hosts - 2} + 2": (2 * (1 + 2 / (hosts - 2)), 2.0, hosts - 2.0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", type=Path, required=True, metavar="DIR")
    parser.add_argument("--mib", type=int, default=96, help="size of the state (default 96)")
    parser.add_argument("--runs", type=int, default=9, help="how often each is done (default 9)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    libraries = sorted(args.packages.glob("pyeclib.libs/libisal*"))
    if not libraries:
        parser.error(f"{args.packages} has no ISA-L; the first lines of this file tell how it comes there")
    speeds = {hosts: measured(libraries[0], hosts, args.mib << 20, args.runs) for hosts in SIZES}
    if args.json:
        print(json.dumps({hosts: {"speeds": speeds[hosts], "costs": reckoned(hosts)} for hosts in SIZES}))
        return
    for hosts in SIZES:
        print(f"{hosts} hosts")
        for name, value in speeds[hosts].items():
            print(f"  {name:26}", f"{value:.2f}" if "/" in name else f"{value / 1e9:.2f} GB/s")
        for name, times in reckoned(hosts).items():
            print(f"  {name:26}", ", ".join(f"{one:.2f}" for one in times))


if __name__ == "__main__":
    main()
