import sys

from jitckpt import cli
from jitckpt.ring import copies

copies.MOST_WAITING = 0
sys.exit(cli.main())
