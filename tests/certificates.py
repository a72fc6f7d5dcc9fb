"""Certificates for tests: of an authority, and of this machine."""

import shutil
import subprocess
from pathlib import Path

import pytest


def certificates(folder: Path) -> Path:
    """Make an authority, and what it has signed for this machine; return the folder."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    new = "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    sign = "openssl x509 -req -in own.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -out own.crt"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for command in (
        f"{new} -x509 -days 2 -subj /CN=authority -keyout ca.key -out ca.crt",
        f"{new} -subj /CN=own -keyout own.key -out own.csr",
        f"{sign} -extfile names",
    ):
        subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder
