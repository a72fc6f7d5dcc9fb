"""A rank that is as cheap as can be, for restarts.py: without torch, it registers and kills itself.

usage: restarting_worker.py FACTS CHECKPOINTS

It adds to FACTS a line of what its agent has.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

from jitckpt.system import descriptors, process_tree
from jitckpt.wire import environment, protocol

given = descriptors.claim(0)
assert given is not None
agent = environment.AGENT_PID.get()
status = Path(f"/proc/{agent}/status").read_text().splitlines()
facts = {
    "descriptors": len(os.listdir(f"/proc/{agent}/fd")),
    "threads": len(os.listdir(f"/proc/{agent}/task")),
    "memory in MiB": next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024,
    "zombies": sum(one.dead for one in process_tree.everybody() if one.parent == agent),
}
with open(sys.argv[1], "a") as file:
    print(json.dumps(facts), file=file)
registered = protocol.Registered(0, os.getpid(), 1, 0, 1, "", "builtin", sys.argv[2])
socket.socket(fileno=given.agent).send(protocol.encode(registered))
os.kill(os.getpid(), signal.SIGKILL)
