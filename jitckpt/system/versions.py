"""Which software a job runs: versions, and a hash of them and of jitckpt's libraries."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

LIBRARIES = Path(__file__).parents[1] / "lib"


def versions() -> dict[str, str]:
    """Return the versions of jitckpt, torch and Python; hash: two jobs with the same one run the same."""
    found = {name: metadata.version(name) for name in ("jitckpt", "torch")}
    found["python"] = platform.python_version()
    digest = hashlib.blake2b(repr(sorted(found.items())).encode(), digest_size=8)
    for library in sorted(LIBRARIES.rglob("*.so*")):
        digest.update(library.read_bytes())
    return found | {"hash": digest.hexdigest()}
