import json
import os
import sys
from pathlib import Path

import fake_worker

os.environ["MADE_BY_THE_TRAINING"] = "yes"
sys.argv.append("seen")
import colorsys  # noqa: E402, F401  (of the standard library, and no other imports it)

seen = {
    "argv": sys.argv[1:],
    "path": sys.path[0],
    "name": __name__,
    "file": __file__,
    "restart": os.environ["TORCHELASTIC_RESTART_COUNT"],
    "restart_of_ours": os.environ["JITCKPT_RESTART"],
    "rank": os.environ["RANK"],
    "warm": "jitckpt.worker.spare" in sys.modules,
    "unbuffered": sys.stdout.write_through,  # type: ignore[union-attr]
    "leads": (os.getsid(0), os.getpgid(0)) == (os.getpid(), os.getpid()),
}
Path(f"seen-{fake_worker.RESTART}-{fake_worker.RANK}.json").write_text(json.dumps(seen))
print("out", fake_worker.RESTART)
print("err", fake_worker.RESTART, file=sys.stderr)
if fake_worker.RESTART == 0:
    fake_worker.register()
    fake_worker.say(fake_worker.protocol.Loaded(fake_worker.RANK, ["colorsys"], [["SET_EARLY", "1"]]))  # type: ignore[attr-defined]
    fake_worker.restore(0)
    if fake_worker.RANK == 1:
        fake_worker.wait_for("both-first-steps")
        fake_worker.die()
    fake_worker.save(1)
