"""Checkpoint sizes by snapshot and GPU, for flush scheduling: synthetic as COLLAB describes, or recorded."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jitckpt.decisions.check import InvalidInput, number, whole
from jitckpt.system import regular_file

Trace = tuple[tuple[float, ...], ...]  # by snapshot, by GPU: bytes

_MB = 1e6
# What COLLAB's text says of its seismic run (RTM), whose trace is not public: 776 snapshots; averages over
# the GPUs grow in a line up to snapshot 400, then jump about; 80, 128 and 160 MB are the 50th, 75th and 98th
# percentile of the averages; in a snapshot the smallest and the largest checkpoint are up to 26-fold and up
# to 107 MB apart; the largest is below 80 MB before snapshot 350, the smallest above 80 MB after 450.
# (It also says 53 GB a GPU in all. With those percentiles it cannot be less than 57; ours has 63.)
_SNAPSHOTS, _GROWING, _FITS_UNTIL, _NEVER_FITS_FROM, _FREE_MB = 776, 400, 350, 451, 80.0
_PERCENTILES, _AVERAGES_MB = (0.5, 0.75, 0.98, 1.0), (80.0, 128.0, 160.0, 165.0)
_SPREAD_SHARE, _SPREAD_MB = 0.925, 53.5  # of the average, to each side: a factor of 26 and 107 MB apart
_BINS = 64


def seismic_trace(gpus: int, seed: int, alike: int = 1) -> Trace:
    """A trace with the statistics that COLLAB gives of its seismic run.

    alike: so many GPUs in a row have checkpoints of one size, as neighbours in the wave field may.
    """
    random = np.random.default_rng(seed)
    growing = np.linspace(2.0, _AVERAGES_MB[0], _GROWING)
    jumping = np.interp(
        random.uniform(_PERCENTILES[0], 1.0, _SNAPSHOTS - _GROWING), _PERCENTILES, _AVERAGES_MB
    )
    jumping.sort()  # the low ones come where some GPUs still fit
    soon = _NEVER_FITS_FROM - _GROWING
    averages = np.concatenate(
        [growing, random.permutation(jumping[:soon]), random.permutation(jumping[soon:])]
    )
    spread = np.minimum(_SPREAD_SHARE * averages, _SPREAD_MB)
    spread[:_FITS_UNTIL] = np.minimum(spread, 0.99 * (_FREE_MB - averages))[:_FITS_UNTIL]
    spread[_NEVER_FITS_FROM:] = np.minimum(spread, 0.99 * (averages - _FREE_MB))[_NEVER_FITS_FROM:]
    different = -(-whole("gpus", gpus, low=1) // whole("alike", alike, low=1, high=gpus))
    shape = np.repeat(random.uniform(-1, 1, (_SNAPSHOTS, different)), alike, axis=1)[:, :gpus]
    shape -= shape.mean(axis=1, keepdims=True)
    shape /= np.maximum(np.abs(shape).max(axis=1, keepdims=True), 1e-12)
    return _as_trace((averages[:, None] + spread[:, None] * shape) * _MB)


def synthetic_trace(gpus: int, snapshots: int, seed: int) -> Trace:
    """COLLAB's synthetic trace: each size drawn on its own from the histogram of the seismic run's sizes."""
    random = np.random.default_rng(seed)
    template = np.array(seismic_trace(8, seed)).ravel()
    counts, edges = np.histogram(template, bins=_BINS)
    share = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
    drawn = random.uniform(0, 1, (whole("snapshots", snapshots, low=1), whole("gpus", gpus, low=1)))
    return _as_trace(np.interp(drawn, share, edges))


def read_trace(path: Path) -> Trace:
    """A recorded trace: CSV without a header, a line a snapshot, bytes of each GPU's checkpoint."""
    rows: list[tuple[float, ...]] = []
    try:
        file = open(regular_file.open_regular(path), newline="")  # noqa: SIM115
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    with file:
        for line, row in enumerate(csv.reader(file), 1):
            try:
                sizes = tuple(number(f"size in line {line} of {path}", float(cell)) for cell in row)
            except ValueError as error:
                raise InvalidInput(f"line {line} of {path} must be numbers of bytes: {error}") from None
            if rows and len(sizes) != len(rows[0]):
                raise InvalidInput(
                    f"line {line} of {path} has {len(sizes)} sizes: the first has {len(rows[0])}"
                )
            rows.append(sizes)
    if not rows:
        raise InvalidInput(f"{path} is empty: a trace needs at least one snapshot")
    return tuple(rows)


def write_trace(path: Path, trace: Sequence[Sequence[float]]) -> None:
    """What `read_trace` reads."""
    with path.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([round(size) for size in sizes] for sizes in trace)


def _as_trace(sizes: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]") -> Trace:
    return tuple(tuple(row) for row in sizes.tolist())
