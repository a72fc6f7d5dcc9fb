import sys

import fake_worker

if fake_worker.RESTART == 0:
    fake_worker.register()
    fake_worker.restore(0)
    fake_worker.wait_for("stopped")
    fake_worker.die()
print("warm" if "jitckpt.worker.spare" in sys.modules else "cold")
