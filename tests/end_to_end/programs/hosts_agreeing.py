# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import sys
import time

from jitckpt import cli
from jitckpt.hosts import stores

agree, meetings = stores.agree, []  # type: ignore[attr-defined,var-annotated]


def stop(store, prefix, place, start, signature):
    meetings.append(prefix)
    if len(meetings) == 2:
        for other in range(1, place[1]):
            store.get(f"{prefix}/agreed/{other}")
        print("all others agree", flush=True)
        time.sleep(600)
    agree(store, prefix, place, start, signature)


stores.agree = stop  # type: ignore[attr-defined]
sys.exit(cli.main())
