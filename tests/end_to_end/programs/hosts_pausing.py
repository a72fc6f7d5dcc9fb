# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import runpy
import sys
import time

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import results
import torch

PAUSES = {("0", "0"): 3, ("1", "0"): 7}  # by restart and rank
queued = results.DoneSteps.queued


def pause(done, step):
    queued(done, step)
    if step == PAUSES.get((os.environ["JITCKPT_RESTART"], os.environ["RANK"])):
        torch.cuda.synchronize()
        print("pauses", flush=True)
        while not os.path.exists("go"):
            time.sleep(0.01)


results.DoneSteps.queued = pause  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
