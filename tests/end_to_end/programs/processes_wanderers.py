# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import os
import signal  # noqa: F401  (a test puts lines behind that use it)
import subprocess
import sys
import time

import fake_worker


def in_its_own_session():
    subprocess.Popen([sys.executable, "-Sc", "import time; time.sleep(1000)"], start_new_session=True)


def as_a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() != 0:
            os._exit(0)
        os.close(1)
        os.close(2)
        time.sleep(1000)
    os.wait()


in_its_own_session()
as_a_daemon()
open(f"there-{fake_worker.RANK}", "w").close()
