import sys

import jitckpt.cli
from jitckpt.agent.pacer import Pacer

measured = Pacer.measured
Pacer.measured = lambda self, step, *_: measured(self, step, 0.9, 0.6)  # type: ignore[method-assign]
sys.exit(jitckpt.cli.main())
