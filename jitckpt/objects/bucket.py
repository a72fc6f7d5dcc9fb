"""Objects below one prefix of a bucket that speaks S3: written in parts, read in pieces, checked on the way.

Credentials, region and endpoint are found as every program of AWS's SDK finds them: environment variables
(AWS_ENDPOINT_URL for another store than AWS's), profiles, the machine's role.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jitckpt.errors import JitckptError
from jitckpt.system import regular_file

PART_BYTES = 16 << 20  # S3 wants at least 5 MiB
MOST_PARTS = 10_000
AT_ONCE = 4  # parts on their way
PIECE_BYTES = 1 << 20  # that is read at a time
TRIES = 5
TRY_SECONDS = 0.5  # before the second try; twice as long before each further one
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
EXISTS = ("PreconditionFailed", "ConditionalRequestConflict", "412", "409")  # what stores call it
NO_CONDITIONS = ("NotImplemented", "501")
_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]+)(?:/(.*))?")
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class ObjectsError(JitckptError):
    """The object store can't be reached, refuses, or has something else than was put there."""


class _Exists(Exception):
    """An object is there already."""


class _NoConditions(Exception):
    """The store, or the SDK, can't write on a condition."""


class DamagedObject(ObjectsError):
    """What comes is not what was put there."""


def is_url(text: str) -> bool:
    """Return whether this names a place in an object store."""
    return text.startswith("s3://")


def parse(url: str) -> tuple[str, str]:
    """Return the bucket, and the prefix with its last slash. Raises ValueError."""
    found = _URL.fullmatch(url)
    if found is None:
        raise ValueError(f"{url!r} is not of the form s3://BUCKET/PREFIX")
    prefix = (found[2] or "").strip("/")
    return found[1], f"{prefix}/" if prefix else ""


class Bucket:
    """One place in an object store; safe for several threads. All that fails is an ObjectsError."""

    def __init__(self, url: str, *, part_bytes: int = PART_BYTES, patience: float = ANSWER_SECONDS) -> None:
        """patience: seconds in which some byte of an answer has to come."""
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise ObjectsError(f"{url} needs the package boto3: pip install 'jitckpt[s3]'.") from error
        self.url = url.rstrip("/")
        self._bucket, self._prefix = parse(url)
        self._part_bytes = part_bytes
        self._knows_conditions = True  # as long as it has not said otherwise
        with _explained(self.url):
            config = Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=patience,
                retries={"total_max_attempts": TRIES, "mode": "standard"},
                max_pool_connections=2 * AT_ONCE,
            )
            self._client: Any = boto3.session.Session().client("s3", config=config)

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Return all objects whose keys begin so, with their bytes."""
        found: dict[str, int] = {}
        with _explained(self._at(prefix)):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for entry in page.get("Contents", ()):
                    found[entry["Key"].removeprefix(self._prefix)] = int(entry["Size"])
        return found

    def get(self, key: str) -> bytes:
        """Return a small object."""
        return b"".join(self.read(key))

    def read(self, key: str) -> Iterator[bytes]:
        """Yield an object's bytes; where the connection breaks, it is gone on from there.

        Raises DamagedObject, at its end, if the store's own checksum is another.
        """
        from botocore.exceptions import FlexibleChecksumError

        offset, tries, size, tag = 0, 0, None, ""
        with _explained(self._at(key)):
            while size is None or offset < size:
                try:
                    wanted = {"Range": f"bytes={offset}-", "IfMatch": tag} if offset else {}
                    answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **wanted)
                    size, tag = offset + int(answer["ContentLength"]), answer["ETag"]
                    for piece in answer["Body"].iter_chunks(PIECE_BYTES):
                        yield piece
                        offset, tries = offset + len(piece), 0
                    if offset >= size:
                        return
                except FlexibleChecksumError as error:
                    raise DamagedObject(f"{self._at(key)} comes damaged: {error}") from error
                except _broken() as error:
                    tries += 1
                    if tries == TRIES:
                        raise ObjectsError(f"{self._at(key)} breaks off again and again: {error}.") from error
                    time.sleep(TRY_SECONDS * 2 ** (tries - 1))

    def put(self, key: str, data: bytes) -> None:
        """Write a small object in one moment."""
        with _explained(self._at(key)):
            self._sent(
                data, lambda: self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=data)
            )

    def put_new(self, key: str, data: bytes) -> bool:
        """Write a small object where none is; return whether what is there now are these bytes.

        A store that knows no conditions is asked first, and may have one by the time that it is written.
        """
        if self._knows_conditions:
            try:
                with _explained(self._at(key)):
                    self._sent(data, lambda: self._put_if_none(key, data))
                return True
            except _Exists:  # perhaps by a try of this call whose answer was lost
                return self.get(key) == data
            except _NoConditions:
                self._knows_conditions = False
        if key in self.sizes(key):
            return self.get(key) == data
        self.put(key, data)
        return True

    def _put_if_none(self, key: str, data: bytes) -> Mapping[str, Any]:
        from botocore.exceptions import ClientError, ParamValidationError

        try:
            answer: Mapping[str, Any] = self._client.put_object(
                Bucket=self._bucket, Key=self._prefix + key, Body=data, IfNoneMatch="*"
            )
            return answer
        except ParamValidationError as error:  # an older SDK
            raise _NoConditions from error
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code in EXISTS:
                raise _Exists from error
            if code in NO_CONDITIONS:
                raise _NoConditions from error
            raise

    def put_file(self, key: str, path: Path, show: Callable[[bytes], object]) -> int:
        """Write a file as an object; return how many bytes were there already, of a try that was cut off.

        show: is given every byte of the file, in order, before the object is there: it may raise, and then
        the object does not come to be. Raises OSError if the file can't be read.
        """
        size = path.stat().st_size
        if size <= self._part_bytes:
            data = regular_file.content_of(path)
            show(data)
            self.put(key, data)
            return 0
        part_bytes = max(self._part_bytes, -(-size // MOST_PARTS))
        with _explained(self._at(key)):
            upload, known = self._unfinished(key)
            there = 0
            parts: dict[int, Future[str]] = {}
            with regular_file.reading(path) as file, ThreadPoolExecutor(AT_ONCE) as pool:
                for number in range(1, -(-size // part_bytes) + 1):
                    data = _whole_read(file, part_bytes)
                    show(data)
                    tag = hashlib.md5(data, usedforsecurity=False).hexdigest()
                    if known.get(number) == (tag, len(data)):
                        there += len(data)
                        parts[number] = Future()
                        parts[number].set_result(tag)
                        continue
                    parts[number] = pool.submit(self._put_part, key, upload, number, data)
                    if number > AT_ONCE:
                        parts[number - AT_ONCE].result()  # no more than these in memory
            listed = [{"PartNumber": number, "ETag": part.result()} for number, part in sorted(parts.items())]
            self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=self._prefix + key,
                UploadId=upload,
                MultipartUpload={"Parts": listed},
            )
        return there

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, in this order."""
        for key in keys:
            with _explained(self._at(key)):
                self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)

    def _unfinished(self, key: str) -> tuple[str, dict[int, tuple[str, int]]]:
        """Return the upload of this object that was begun, with its parts by number; else a new one."""
        place = {"Bucket": self._bucket, "Prefix": self._prefix + key}
        begun = [
            one
            for page in self._client.get_paginator("list_multipart_uploads").paginate(**place)
            for one in page.get("Uploads", ())
            if one["Key"] == self._prefix + key
        ]
        if not begun:
            made = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._prefix + key)
            return made["UploadId"], {}
        upload: str = max(begun, key=lambda one: one["Initiated"])["UploadId"]
        pages = self._client.get_paginator("list_parts").paginate(
            Bucket=self._bucket, Key=self._prefix + key, UploadId=upload
        )
        parts = (part for page in pages for part in page.get("Parts", ()))
        return upload, {part["PartNumber"]: (_md5(part["ETag"]), part["Size"]) for part in parts}

    def _put_part(self, key: str, upload: str, number: int, data: bytes) -> str:
        def send() -> Mapping[str, Any]:
            answer: Mapping[str, Any] = self._client.upload_part(
                Bucket=self._bucket, Key=self._prefix + key, UploadId=upload, PartNumber=number, Body=data
            )
            return answer

        return self._sent(data, send)

    def _sent(self, data: bytes, send: Callable[[], Mapping[str, Any]]) -> str:
        """Send bytes until the store says that it has the very same; return what it calls them."""
        own = hashlib.md5(data, usedforsecurity=False).hexdigest()
        for turn in range(TRIES):
            answer = send()
            tag = _md5(answer["ETag"])
            # With a key of the customer's the tag is no MD5; then the SDK's own checksum has to do.
            if tag == own or answer.get("ServerSideEncryption", "AES256") != "AES256":
                return str(answer["ETag"])
            time.sleep(TRY_SECONDS * 2**turn)
        raise ObjectsError(f"{self.url} has other bytes than were sent, {TRIES} times one after another.")

    def _at(self, key: str) -> str:
        return f"{self.url}/{key}"


def _md5(tag: str) -> str:
    found = _MD5.fullmatch(tag)
    return found[1] if found else tag


def _whole_read(file: Any, size: int) -> bytes:
    pieces = []
    while size and (piece := file.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _broken() -> tuple[type[Exception], ...]:
    """Return what is raised where an answer breaks off, which the SDK does not try again by itself."""
    from botocore import exceptions

    return (
        exceptions.ReadTimeoutError,
        exceptions.ResponseStreamingError,
        exceptions.IncompleteReadError,
        exceptions.ConnectionError,
    )


@contextmanager
def _explained(where: str) -> Iterator[None]:
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except NoCredentialsError as error:
        raise ObjectsError(
            f"{where}: there are no credentials. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, "
            "or give the machine a role."
        ) from error
    except ClientError as error:
        what = error.response.get("Error", {})
        raise ObjectsError(
            f"{where} is refused: {what.get('Code', '?')}, {what.get('Message', error)}".rstrip(".") + "."
        ) from error
    except (BotoCoreError, Boto3Error) as error:
        raise ObjectsError(f"{where} can't be reached: {error}".rstrip(".") + ".") from error
