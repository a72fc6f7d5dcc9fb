"""A disk that fails, and a process or a machine that dies, at any call of a save, a commit or a recovery."""

import json
import os
import subprocess
import sys
from pathlib import Path

import preloads

PROGRAM = Path(__file__).parent / "programs" / "disk.py"
# A sample; all by command: LD_PRELOAD=libdisk.so python tests/native/programs/disk.py
SAMPLE = ["--every", "13", "--offset", "5"]


def test_whenever_it_stops_the_older_save_or_the_newer_one_is_there(tmp_path: Path) -> None:
    environment = os.environ | {"LD_PRELOAD": str(preloads.compiled(tmp_path))}
    command = [sys.executable, str(PROGRAM), *SAMPLE]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert result["failures"] == []
    assert min(result["trials"].values()) >= 7, "every kind of failure in every case"
