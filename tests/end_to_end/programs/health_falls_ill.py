import os
import pathlib
import runpy
import sys

if (os.environ["RANK"], os.environ["JITCKPT_RESTART"]) == ("1", "0"):
    pathlib.Path("ill").touch()
sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
