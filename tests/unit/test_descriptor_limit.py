"""The agent has more descriptors than what it starts."""

import subprocess
import sys

PROGRAM = """
import resource, subprocess, sys
from jitckpt.system import descriptor_limit
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
descriptor_limit.MOST = hard
descriptor_limit.raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
descriptor_limit.give_back(child.pid)
assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (hard // 2, hard)
child.communicate()
descriptor_limit.give_back(child.pid)
print("done")
"""


def test_what_it_starts_has_the_limit_that_it_was_started_with() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "done\n"
