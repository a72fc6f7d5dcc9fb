# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import runpy
import sys
import time

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import results
import torch

queued = results.DoneSteps.queued


def stop(done, step):
    queued(done, step)
    if (os.environ["JITCKPT_RESTART"], os.environ["RANK"], step) == ("0", "1", 3):
        torch.cuda.synchronize()
        print("stops", flush=True)
        time.sleep(600)


results.DoneSteps.queued = stop  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
