# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import runpy
import sys

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import results
import torch

queued = results.DoneSteps.queued


def die(done, step):
    queued(done, step)
    if step == 2:
        torch.cuda.synchronize()
        os.kill(os.getpid(), 9)


results.DoneSteps.queued = die  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
