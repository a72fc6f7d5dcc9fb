import os
import sys
import time
from pathlib import Path

import jitckpt.agent.agent
import jitckpt.cli

Path(f"loaded-{os.getpid()}").touch()
while len([*Path().glob("loaded-*")]) < int(sys.argv[1]):
    time.sleep(0.01)
sys.argv = [sys.argv[0], *sys.argv[2:]]
sys.exit(jitckpt.cli.main())
