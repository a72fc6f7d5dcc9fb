# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import sys

from jitckpt import cli
from jitckpt.agent import standby
from jitckpt.faults.injection import OF_A_BROKEN_DEVICE

of_server = standby._Adopted._of_server


def broken(self, rank):
    return {**of_server(self, rank), **(OF_A_BROKEN_DEVICE if rank == 3 else {})}


standby._Adopted._of_server = broken  # type: ignore[method-assign]
sys.exit(cli.main())
