# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import runpy
import sys
import time

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import results

queued = results.DoneSteps.queued


def hold(done, step):
    queued(done, step)
    if step == done.steps - 1 and not os.path.exists("go"):
        done.finish()
        while not os.path.exists("go"):
            time.sleep(0.01)


results.DoneSteps.queued = hold  # type: ignore[method-assign]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
