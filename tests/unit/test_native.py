"""The binding to the preloaded library; what needs the library itself is tested end to end."""

import re
import subprocess
import sys
from pathlib import Path

from jitckpt.bindings import interpose

HEADER = Path(__file__).parents[2] / "native" / "interpose" / "jitckpt.h"


def declarations(text: str) -> list[str]:
    """The declarations of a C text, without comments and preprocessor lines, evenly spaced."""
    text = re.sub(r"//[^\n]*|^#[^\n]*", "", text, flags=re.MULTILINE)
    text = text.replace('extern "C" {', "")
    return [part for part in re.split(r"(?<=[;}])\s*", re.sub(r"\s+", " ", text)) if part not in ("}", " ")]


def test_the_declarations_are_those_of_the_header() -> None:
    found = declarations(HEADER.read_text())
    assert declarations(interpose.DECLARATIONS) == found
    assert len(found) > 10


def test_the_version_is_that_of_the_header() -> None:
    version = re.search(r"#define JITCKPT_ABI (\d+)", HEADER.read_text())
    assert version is not None
    assert int(version[1]) == interpose.ABI


def test_without_the_library_it_says_how_to_preload_it() -> None:
    program = "from jitckpt.bindings.interpose import Native; Native()"
    result = subprocess.run(
        [sys.executable, "-c", program], env={}, capture_output=True, text=True, timeout=300, check=False
    )
    assert "NativeError: libjitckpt.so is not preloaded into this process (LD_PRELOAD is '')" in result.stderr
    assert "LD_PRELOAD=$(jitckpt lib)" in result.stderr


def test_a_library_of_another_version_is_refused(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text("int jitckpt_abi(void) { return 999; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True, timeout=300)
    result = subprocess.run(
        [sys.executable, "-c", "from jitckpt.bindings.interpose import Native; Native()"],
        env={"LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "speaks version 999 of the interface" in result.stderr
