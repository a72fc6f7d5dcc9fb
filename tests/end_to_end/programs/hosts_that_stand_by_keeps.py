import sys
import time

from torch.distributed import TCPStore  # type: ignore[attr-defined]

host, port = sys.argv[1].split(":")
store = TCPStore(host, int(port), is_master=True, wait_for_workers=False)
print("there", flush=True)
time.sleep(600)
