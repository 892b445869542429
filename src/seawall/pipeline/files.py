"""Files as sources: lines and CSV records, with a checkpoint, also of files that are rotated.

Promises:
- Without a stop nothing is read twice; after a crash at most what was read since the last
  checkpoint is read again, and nothing is left out.
- A file that is rotated (renamed, and begun anew) is read to its end, then those that were rotated
  after it, in their order, then the new one. What was compressed or removed before is not read.
- An id is the number of the file, counted from the first one that this checkpoint knew, and the
  byte where the record ends: with a checkpoint it stays the same in later runs.
"""

from __future__ import annotations

import csv
import logging
import os
import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, Final, Generic, NamedTuple, TypeVar

from seawall import _checks as check
from seawall.models.fifo import Positions
from seawall.pipeline.checkpoint import CheckpointTarget, SavedPlace, not_a_place, wait_for_oldest
from seawall.pipeline.source import FaultyItem, checked_name
from seawall.runtime.driver import sleep_async

T = TypeVar("T")

LOOK_EVERY: Final = 0.2
"""Seconds between two looks for more, at the end of a file that is followed."""
LONGEST_RECORD: Final = 16 * 2**20
"""Bytes of one line or record; what is longer is a dead letter."""
SHOWN: Final = 1000
"""Bytes of such a record that the dead letter has."""
HEAD: Final = 256
"""Bytes at its beginning by which a file is recognised: another one may get its inode."""

_ROTATED: Final = re.compile(r"\.(\d{1,4})|[.-]\d[\dT_:.-]*")
"""What rotation adds to the name of a file: .1, -20261118 and the like."""


class FilePlace(NamedTuple):
    """Where a record ends: in which file since the first run, and at which byte."""

    file: int
    byte: int

    def __str__(self) -> str:
        return f"{self.byte}" if self.file == 1 else f"{self.file}-{self.byte}"


class FileSource(Generic[T]):
    """See `lines` and `csv_rows`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        parse: Callable[[bytes], T],
        is_whole: Callable[[list[bytes]], bool],
        *,
        checkpoint: CheckpointTarget,
        every: float,
        follow: bool,
        name: str | None,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError(f"path={path!r}: write the path of a file, such as 'orders.jsonl'")
        self.path = Path(path)
        self.name = self.path.name if name is None else checked_name(name)
        self._parse = parse
        self._is_whole = is_whole
        self._place = SavedPlace(checkpoint, every)
        self._follow = check.flag("follow", follow)
        self._reading: _OpenFile | None = None
        self._files: dict[int, _OpenFile] = {}
        """Files of which items are on their way, by number, and the one that is read."""
        self._numbers = 0
        self._known: dict[int, tuple[int, bytes]] = {}
        """Rotated files that are not to be read, or not again: size and beginning, by inode."""

    async def pull(self, most: int) -> Sequence[tuple[T, FilePlace]]:
        """Return the next records; wait for more at the end if the file is followed."""
        while True:
            reading = self._reading or await self._open()
            if reading is not None:
                await wait_for_oldest(reading.positions, self.name)
                is_last = reading.is_abandoned or not self._follow
                records: list[tuple[Any, int]] = []
                if reading.is_the_same():
                    records = reading.read(most, self._is_whole, is_last=is_last)
                if records:
                    return [
                        (self._value_of(record), FilePlace(reading.number, end))
                        for record, end in records
                    ]
                if self._moves_on(reading):
                    continue
            if not self._follow:
                if reading is None:
                    raise FileNotFoundError(f"{self.path}: there is no such file to read from")
                return ()
            await sleep_async(LOOK_EVERY)

    def _value_of(self, record: Any) -> Any:
        return record if isinstance(record, FaultyItem) else self._parse(record)

    async def acknowledge(self, handles: Sequence[FilePlace]) -> None:
        """Move the checkpoint, and save it now and then."""
        for number, end in handles:
            reading = self._files.get(number)
            if reading is not None:  # else all of it has ended, and this is said again
                reading.positions.finish(end)
        self._forget_ended()
        await self._place.save_if_due(self._oldest)

    async def give_back(self, handles: Sequence[FilePlace]) -> None:
        """Do nothing: the checkpoint stays before them."""

    async def close(self) -> None:
        """Save the checkpoint."""
        try:
            await self._place.save(self._oldest())
        finally:
            if self._reading is not None:
                self._reading.file.close()
                self._reading = None  # another run begins at the checkpoint
                self._files.clear()

    def snapshot(self) -> dict[str, Any]:
        """Return which file is read, and how far."""
        reading = self._reading
        return {
            "kind": "file",
            "path": str(self.path),
            "file": self._numbers,
            "byte": 0 if reading is None else reading.end,
        }

    # Files

    async def _open(self) -> _OpenFile | None:
        """Open the file where the last run ended, or from its beginning."""
        saved = await self._load()
        if saved is not None:
            self._numbers = saved.file - 1
            found = self._recognised(saved)
            if found is not None:
                reading = self._begin(found, saved.offset)
                last_write = reading.status.st_mtime_ns
                self._pass_over(lambda status: status.st_mtime_ns < last_write)
                return reading
            self._numbers = saved.file  # another file, so that its records have other ids
            if self.path.exists():
                logging.getLogger("seawall").warning(
                    "%s is not the file of which %s is the checkpoint, nor is one beside it: it is"
                    " read from its beginning",
                    self.path,
                    self._place.checkpoint,
                )
        self._pass_over(lambda _status: True)
        try:
            return self._begin(self.path, 0)
        except FileNotFoundError:
            return None  # not yet, or it is rotated at this moment

    def _begin(self, path: Path, offset: int) -> _OpenFile:
        file = path.open("rb")
        if offset > os.fstat(file.fileno()).st_size:
            offset = 0  # it was truncated
            self._numbers += 1
        file.seek(offset)
        self._numbers += 1
        self._reading = _OpenFile(file, self._numbers, offset)
        self._files[self._numbers] = self._reading
        self._forget_ended()
        return self._reading

    def _recognised(self, saved: _Saved) -> Path | None:
        """Return the file that was being read: the same, or what rotation has renamed it to."""
        for path in (self.path, *sorted(self.path.parent.glob(f"{self.path.name}*"))):
            try:
                is_it = path.stat().st_ino == saved.inode
            except FileNotFoundError:
                continue
            head = _head_of(path) if is_it else None
            if head is not None and saved.head == _digest(head[: saved.head_size]):
                return path
        return None

    def _rotated(self) -> list[tuple[Path, os.stat_result]]:
        """Return what rotation has made of earlier files, the oldest first."""
        found = []
        for path in self.path.parent.glob(f"{self.path.name}?*"):
            suffix = _ROTATED.fullmatch(path.name.removeprefix(self.path.name))
            if suffix is None:
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            # Of .1, .2 and so on the largest is the oldest; of dates the smallest.
            count = int(suffix[1]) if suffix[1] is not None else 0
            found.append(((status.st_mtime_ns, -count, path.name), path, status))
        return [(path, status) for _, path, status in sorted(found, key=lambda one: one[0])]

    def _moves_on(self, reading: _OpenFile) -> bool:
        """Begin the next file if this one was rotated or truncated; it is read to its end."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False
        following = self.path
        if now.st_ino == reading.status.st_ino:
            if now.st_size >= reading.end and reading.is_the_same():
                return False
            self._pass_over(lambda _status: True)  # a copy of what was truncated, if any
        else:
            following = self._next_after(reading, now)
            if following == self.path and not now.st_size:
                return False  # the writer may still write to the one that was renamed
            if reading.is_the_same() and reading.has_more():
                # The last record may be about to be finished: look once more, then take it as it
                # is.
                return reading.is_abandoned
        reading.file.close()
        try:
            self._begin(following, 0)
        except FileNotFoundError:
            return False  # it is rotated at this moment: look again
        return True

    def _next_after(self, reading: _OpenFile, newest: os.stat_result) -> Path:
        """Return what comes after a file that was rotated: the newest one, or one between them."""
        self._known[reading.status.st_ino] = (reading.end, reading.head)
        rotated = self._rotated()
        there = {status.st_ino for _, status in rotated}
        self._known = {inode: known for inode, known in self._known.items() if inode in there}
        for path, status in rotated:
            if status.st_ino != newest.st_ino and not self._is_known(path, status):
                return path
        return self.path

    def _is_known(self, path: Path, status: os.stat_result) -> bool:
        size, head = self._known.get(status.st_ino, (0, None))
        if head is None or status.st_size < size:
            return False
        return (_head_of(path) or b"").startswith(head)

    def _pass_over(self, which: Callable[[os.stat_result], bool]) -> None:
        """Do not read those rotated files that are there now."""
        for path, status in self._rotated():
            if which(status):
                head = _head_of(path)
                if head is not None:
                    self._known[status.st_ino] = (status.st_size, head)

    def _forget_ended(self) -> None:
        """Forget files of which everything has ended, up to the first of which it has not."""
        for number, reading in list(self._files.items()):
            if len(reading.positions) or reading is self._reading:
                break
            del self._files[number]

    # The checkpoint

    async def _load(self) -> _Saved | None:
        saved = await self._place.load(lambda place: isinstance(place, dict))
        if saved is None:
            return None
        try:
            names = ("inode", "offset", "file", "head_size")
            inode, offset, file, size = (int(saved[name]) for name in names)
            return _Saved(inode, offset, file, size, str(saved["head"]))
        except (ValueError, KeyError, TypeError):
            raise not_a_place(self._place.checkpoint) from None

    def _oldest(self) -> dict[str, int | str] | None:
        """Return the place in the oldest file of which something has not ended."""
        reading = next(iter(self._files.values()), None)
        if reading is None:
            return None
        offset = reading.positions.checkpoint
        head = reading.head[:offset]
        return _Saved(
            reading.status.st_ino, offset, reading.number, len(head), _digest(head)
        )._asdict()


class _Saved(NamedTuple):
    """What a checkpoint holds."""

    inode: int
    offset: int
    file: int
    """Its number; 1 for the first that this checkpoint knew."""
    head_size: int
    head: str
    """Recognises the file by its first bytes, of those before the offset."""


def _head_of(path: Path) -> bytes | None:
    """Return how a file begins, None if it is gone."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except FileNotFoundError:
        return None


def _digest(head: bytes) -> str:
    return blake2b(head, digest_size=16).hexdigest()


class _OpenFile:
    """One file that is read."""

    def __init__(self, file: BinaryIO, number: int, offset: int) -> None:
        self.file = file
        self.number = number
        self.status = os.fstat(file.fileno())
        self.end = offset
        """Where the last record ended."""
        self.positions = Positions(offset)
        self.is_abandoned = False
        """Whether nothing was added between two looks after it was rotated."""
        self.head = b""
        """Its first bytes, as far as they were there when it was looked at."""
        self._size = -1

    def is_the_same(self) -> bool:
        """Return whether it still begins as it did: it was not truncated and written anew."""
        # Past the buffer, which may hold what was there before; the file's own place stays.
        number = self.file.fileno()
        place = os.lseek(number, 0, os.SEEK_CUR)
        os.lseek(number, 0, os.SEEK_SET)
        begins = os.read(number, HEAD)
        os.lseek(number, place, os.SEEK_SET)
        if not begins.startswith(self.head):
            return False
        self.head = begins
        return True

    def read(
        self, most: int, is_whole: Callable[[list[bytes]], bool], *, is_last: bool
    ) -> list[tuple[Any, int]]:
        """Return the next whole records, each with its end; the last line may lack its newline.

        A record is bytes, or a `FaultyItem`.
        """
        records: list[tuple[Any, int]] = []
        while len(records) < most:
            record = self._record(is_whole)
            found: Any
            if record is None:
                found, size = self._first_line(is_last=is_last)
            else:
                found, is_complete = record
                size = len(found) if is_complete or is_last else 0
            if not size:
                break
            self.end += size
            self.positions.begin(self.end)
            records.append((found, self.end))
        return records

    def _record(self, is_whole: Callable[[list[bytes]], bool]) -> tuple[bytes, bool] | None:
        """Return the next record, and whether it is whole; None if it is too long."""
        self.file.seek(self.end)
        lines: list[bytes] = []
        size = 0
        while True:
            line = self.file.readline(LONGEST_RECORD + 1)
            lines.append(line)
            size += len(line)
            if size > LONGEST_RECORD:
                return None
            if not line.endswith(b"\n"):
                return b"".join(lines), False
            if is_whole(lines):
                return b"".join(lines), True

    def _first_line(self, *, is_last: bool) -> tuple[FaultyItem, int]:
        """Return the first line of a record that is too long, as it began, and its size."""
        self.file.seek(self.end)
        line = self.file.readline(LONGEST_RECORD)
        begins, size = line[:SHOWN], len(line)
        while line and not line.endswith(b"\n"):
            line = self.file.readline(LONGEST_RECORD)
            size += len(line)
        error = ValueError(f"the record at byte {self.end} is longer than {LONGEST_RECORD} bytes")
        return FaultyItem(_text(begins), error), size if line or is_last else 0

    def has_more(self) -> bool:
        """Return whether there is something behind the last record of a rotated file."""
        before, self._size = self._size, os.fstat(self.file.fileno()).st_size
        self.is_abandoned = self._size == before
        return self._size > self.end


def lines(
    path: str | os.PathLike[str],
    *,
    checkpoint: CheckpointTarget = None,
    every: float = 1.0,
    follow: bool = False,
    name: str | None = None,
) -> FileSource[str]:
    """Read the lines of a file, as text without their ends; undecodable bytes are replaced.

    With `checkpoint`, a path, it goes on where it stopped: the place is saved `every` few seconds,
    and a resumed run repeats at most what was read since. With `follow` it waits for more at the
    end, also when the file is rotated. For JSON lines write `.stage(json.loads)` behind it: then a
    line that is no JSON is a dead letter.
    """
    return FileSource(
        path,
        _text,
        lambda _lines: True,
        checkpoint=checkpoint,
        every=every,
        follow=follow,
        name=name,
    )


def csv_rows(
    path: str | os.PathLike[str],
    *,
    checkpoint: CheckpointTarget = None,
    every: float = 1.0,
    follow: bool = False,
    name: str | None = None,
) -> FileSource[list[str]]:
    """Read the records of a CSV file as lists of texts, the header too; quotes may span lines.

    A record that is no CSV, such as one with a field above `csv.field_size_limit()`, is a list of
    one text: the record as it is. The settings are those of `lines`.
    """
    return FileSource(
        path,
        _row,
        _is_whole_row,
        checkpoint=checkpoint,
        every=every,
        follow=follow,
        name=name,
    )


def _text(record: bytes) -> str:
    return record.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace")


def _row(record: bytes) -> list[str]:
    text = record.decode("utf-8", "replace")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return [_text(record)]


def _is_whole_row(lines: list[bytes]) -> bool:
    """Return whether a record ends here, as `csv` sees it: a quote within a text is a character.

    Called after each line; so of several lines, all before the last one are not whole.
    """
    if b'"' not in lines[-1]:
        return len(lines) == 1
    rows = csv.reader([b"".join(lines).decode("utf-8", "replace"), ""])
    try:
        next(rows)
    except csv.Error:
        return True
    return rows.line_num == 1
