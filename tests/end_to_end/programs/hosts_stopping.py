# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import runpy
import sys
import time


def stop():
    print("stops", flush=True)
    time.sleep(600)


restart, rank = os.environ["JITCKPT_RESTART"], os.environ["RANK"]
if (restart, rank) == ("1", "1"):
    stop()
if (restart, rank) == ("2", "1"):
    from jitckpt.saves import folders

    folders.read = lambda record: stop()
if (restart, rank) == ("1", "0"):
    print("started", flush=True)
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
