import sys

from jitckpt import cli
from jitckpt.hosts import stores

stores.DEAD_SECONDS = 3
sys.exit(cli.main())
