"""How the replicas of a state tell each other of it, through torch's store."""

import itertools
import json
from collections.abc import Callable, Mapping

import torch
from torch.distributed.distributed_c10d import Store

_made = itertools.count()  # in this process: a script may train one model after the other


class Replicas:
    """Those of one rank's state, in one start of the job."""

    def __init__(self, rank: int, shard: int, restart: int, store: Callable[[], Store]) -> None:
        """store: returns the job's, once the ranks are a process group."""
        self._rank, self._store = rank, store
        self._prefix = f"jitckpt/self-check/{restart}/{next(_made)}/{shard}"

    def post(self, step: int, digests: Mapping[str, str]) -> tuple[int, Mapping[str, str]] | None:
        """Tell them what this rank's state is, or hear it of the first one that told."""
        if not torch.distributed.is_initialized():
            return None
        store = self._store()
        told = store.compare_set(f"{self._prefix}/{step}", "", json.dumps([self._rank, digests]))
        rank, others = json.loads(told)
        return None if rank == self._rank else (rank, others)

    def is_first_to_say(self) -> bool:
        """Whether none has said before that they differ."""
        store = self._store()
        said: int = store.add(f"{self._prefix}/said", 1)
        return said == 1
