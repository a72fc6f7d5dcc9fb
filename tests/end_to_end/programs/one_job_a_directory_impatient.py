import os
import runpy
import sys

from jitckpt.saves import directory_lock

directory_lock.PATIENCE_SECONDS = 0.5
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
