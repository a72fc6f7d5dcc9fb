"""Files that a rank writes come to its next host with it."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitckpt.agent.migration.written_files import put_written_files
from jitckpt.bindings.criu import CriuError
from jitckpt.wire.moves import WrittenFile

CONTENT = b"line\n" * (1 << 19)

Put = Callable[[contextlib.ExitStack], None]


@pytest.fixture
def put(tmp_path: Path) -> Iterator[Put]:
    """Have the file come to `there`."""
    (images := tmp_path / "images").mkdir()
    (images / "written-0").write_bytes(CONTENT)
    folder = os.open(images, os.O_RDONLY)
    file = WrittenFile(str(tmp_path / "logs" / "log"), 0o640, os.getuid(), os.getgid())
    yield lambda undo: put_written_files([file], folder, undo)
    os.close(folder)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "log"


def test_it_is_there_as_it_was(put: Put, there: Path) -> None:
    with contextlib.ExitStack() as undo:
        put(undo)
        assert there.read_bytes() == CONTENT
        assert there.stat().st_mode & 0o7777 == 0o640
    assert not there.exists(), "the rank could not be made again"


@pytest.mark.parametrize("size", [0, 7, 1 << 20, len(CONTENT)])
def test_a_beginning_of_it_is_gone_on_with(put: Put, there: Path, size: int) -> None:
    there.parent.mkdir()
    there.write_bytes(CONTENT[:size])
    with contextlib.ExitStack() as undo:
        put(undo)
        assert there.read_bytes() == CONTENT
    assert there.read_bytes() == CONTENT[:size]


@pytest.mark.parametrize("before", [b"other", CONTENT + b"more", CONTENT[:-1] + b"?"])
def test_another_file_stays_as_it_is(put: Put, there: Path, before: bytes) -> None:
    there.parent.mkdir()
    there.write_bytes(before)
    with contextlib.ExitStack() as undo, pytest.raises(CriuError, match="and here that is another file"):
        put(undo)
    assert there.read_bytes() == before
