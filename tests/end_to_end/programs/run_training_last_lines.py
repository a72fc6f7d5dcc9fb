import os
import runpy
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(sys.argv[1]))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
if (os.environ["JITCKPT_RESTART"], os.environ["RANK"]) == ("0", "0"):
    from pathlib import Path

    from jitckpt.events import read_events

    while not any(event["event"] == "at_end" for event in read_events(Path("ckpt"))[0]):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
