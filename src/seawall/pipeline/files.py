"""Files as sources: lines and CSV records, with a checkpoint, also of files that are rotated.

Promises:
- Without a stop nothing is read twice; after a crash at most what was read since the last
  checkpoint is read again, and nothing is left out.
- A file that is rotated (renamed, and begun anew) is read to its end, then the new one.
- The checkpoint is replaced as a whole: a crash leaves the old one or the new one.
"""

from __future__ import annotations

import csv
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Generic, NamedTuple, TypeVar

from seawall import _checks as check
from seawall.clock import Clock, check_clock, current_clock
from seawall.models.positions import Positions
from seawall.runtime.runners import sleep_async

T = TypeVar("T")

LOOK_EVERY: Final = 0.2
"""Seconds between two looks for more, at the end of a file that is followed."""
LONGEST_RECORD: Final = 16 * 2**20
"""Bytes of one line or record."""


class FilePlace(NamedTuple):
    """Where a record ends: in which file since the start, and at which byte."""

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
        is_whole: Callable[[bytes], bool],
        *,
        checkpoint: str | os.PathLike[str] | None,
        every: float,
        follow: bool,
        name: str | None,
        clock: Clock | None,
    ) -> None:
        """Make a value of each record by `parse`; a record may be more than one line."""
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise TypeError(f"path={path!r}: write the path of a file, such as 'orders.jsonl'")
        if checkpoint is not None and (
            not isinstance(checkpoint, str | os.PathLike) or not os.fspath(checkpoint)
        ):
            raise TypeError(f"checkpoint={checkpoint!r}: write the path of a file to keep it in")
        self.path = Path(path)
        self.name = self.path.name if name is None else name
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"name={name!r}: write a name, such as 'orders'")
        self._parse = parse
        self._is_whole = is_whole
        self._checkpoint = None if checkpoint is None else Path(checkpoint)
        self._every = check.seconds("every", every, zero=True)
        self._follow = check.flag("follow", follow)
        self._clock = current_clock() if clock is None else check_clock(clock)
        self._saved_at = self._clock.now()
        self._reading: _Reading | None = None
        self._files: dict[int, _Reading] = {}
        """Files of which items are on their way, by number."""
        self._numbers = 0

    async def pull(self, most: int) -> Sequence[tuple[T, FilePlace]]:
        """Return the next records; wait for more at the end if the file is followed."""
        while True:
            reading = self._reading or self._open()
            if reading is not None:
                is_last = reading.is_abandoned or not self._follow
                records = reading.read(most, self._is_whole, is_last=is_last)
                if records:
                    return [
                        (self._parse(record), FilePlace(reading.number, end))
                        for record, end in records
                    ]
                if self._moves_on(reading):
                    continue
            if not self._follow:
                if reading is None:
                    raise FileNotFoundError(f"{self.path}: there is no such file to read from")
                return ()
            await sleep_async(LOOK_EVERY)

    async def acknowledge(self, handles: Sequence[FilePlace]) -> None:
        """Move the checkpoint, and save it now and then."""
        for number, end in handles:
            self._files[number].positions.finish(end)
        if self._checkpoint is not None and self._clock.now() - self._saved_at >= self._every:
            self._save()

    async def give_back(self, handles: Sequence[FilePlace]) -> None:
        """Do nothing: the checkpoint stays before them."""

    async def close(self) -> None:
        """Save the checkpoint."""
        if self._checkpoint is not None and self._files:
            self._save()
        if self._reading is not None:
            self._reading.file.close()

    # Files

    def _open(self) -> _Reading | None:
        """Open the file where the last run ended, or from its beginning."""
        saved = self._load()
        if saved is not None:
            found = self._by_inode(saved["inode"])
            if found is not None:
                return self._begin(found, saved["offset"])
            if self.path.exists():
                logging.getLogger("seawall").warning(
                    "%s is not the file of which %s is the checkpoint, nor is one beside it: it is"
                    " read from its beginning",
                    self.path,
                    self._checkpoint,
                )
        return self._begin(self.path, 0) if self.path.exists() else None

    def _begin(self, path: Path, offset: int) -> _Reading:
        file = path.open("rb")
        if offset > os.fstat(file.fileno()).st_size:
            offset = 0  # it was truncated
        file.seek(offset)
        self._numbers += 1
        self._reading = _Reading(file, self._numbers, offset)
        self._files[self._numbers] = self._reading
        return self._reading

    def _by_inode(self, inode: int) -> Path | None:
        """Return the file that was being read: the same, or what rotation has renamed it to."""
        for path in (self.path, *sorted(self.path.parent.glob(f"{self.path.name}*"))):
            try:
                if path.stat().st_ino == inode:
                    return path
            except FileNotFoundError:
                continue
        return None

    def _moves_on(self, reading: _Reading) -> bool:
        """Begin the new file if this one was rotated or truncated; it is read to its end."""
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return False
        if now.st_ino == reading.inode:
            if now.st_size >= reading.end:
                return False
        elif reading.has_more():
            # Whoever writes may be about to finish the last record: look once more, then take it
            # as it is.
            return reading.is_abandoned
        reading.file.close()
        self._begin(self.path, 0)
        return True

    # The checkpoint

    def _load(self) -> dict[str, int] | None:
        if self._checkpoint is None or not self._checkpoint.exists():
            return None
        try:
            saved = json.loads(self._checkpoint.read_bytes())
            return {"inode": int(saved["inode"]), "offset": int(saved["offset"])}
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{self._checkpoint} is no checkpoint of a file: remove it to begin anew"
            ) from None

    def _save(self) -> None:
        """Save the place in the oldest file of which something is not done."""
        if self._checkpoint is None:
            return
        for number, reading in list(self._files.items()):
            if len(reading.positions) or reading is self._reading:
                break
            del self._files[number]
        reading = next(iter(self._files.values()))
        saved = {"inode": reading.inode, "offset": reading.positions.checkpoint}
        beside = self._checkpoint.with_name(f"{self._checkpoint.name}.new")
        with beside.open("w") as file:
            json.dump(saved, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self._checkpoint)
        self._saved_at = self._clock.now()


class _Reading:
    """One file that is read."""

    def __init__(self, file: BinaryIO, number: int, offset: int) -> None:
        self.file = file
        self.number = number
        self.inode = os.fstat(file.fileno()).st_ino
        self.end = offset
        """Where the last record ended."""
        self.positions = Positions(offset)
        self.is_abandoned = False
        """Whether nothing was added between two looks after it was rotated."""
        self._size = -1

    def read(
        self, most: int, is_whole: Callable[[bytes], bool], *, is_last: bool
    ) -> list[tuple[bytes, int]]:
        """Return the next whole records, each with its end; the last line may lack its newline."""
        records: list[tuple[bytes, int]] = []
        while len(records) < most:
            self.file.seek(self.end)
            record = b""
            while True:
                line = self.file.readline(LONGEST_RECORD + 1)
                record += line
                if len(record) > LONGEST_RECORD:
                    raise ValueError(
                        f"the record at byte {self.end} is longer than {LONGEST_RECORD} bytes"
                    )
                has_end = line.endswith(b"\n")
                whole = has_end and is_whole(record)
                if whole or not has_end:
                    break
            if not record or not (whole or is_last):
                break
            self.end += len(record)
            self.positions.begin(self.end)
            records.append((record, self.end))
        return records

    def has_more(self) -> bool:
        """Return whether there is something behind the last record of a rotated file."""
        before, self._size = self._size, os.fstat(self.file.fileno()).st_size
        self.is_abandoned = self._size == before
        return self._size > self.end


def lines(
    path: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 1.0,
    follow: bool = False,
    name: str | None = None,
    clock: Clock | None = None,
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
        _always,
        checkpoint=checkpoint,
        every=every,
        follow=follow,
        name=name,
        clock=clock,
    )


def csv_rows(
    path: str | os.PathLike[str],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    every: float = 1.0,
    follow: bool = False,
    name: str | None = None,
    clock: Clock | None = None,
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
        clock=clock,
    )


def _text(record: bytes) -> str:
    return record.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8", "replace")


def _row(record: bytes) -> list[str]:
    text = record.decode("utf-8", "replace")
    try:
        return next(csv.reader([text]), [])
    except csv.Error:
        return [_text(record)]


def _always(_record: bytes) -> bool:
    return True


def _is_whole_row(record: bytes) -> bool:
    """Tell whether a record ends here, as `csv` sees it: a quote within a text is a character.

    It is asked after each line; so of several lines, all before the last one are not whole.
    """
    last = record.rfind(b"\n", 0, -1) + 1
    if record.find(b'"', last) < 0:
        return last == 0
    rows = csv.reader([record.decode("utf-8", "replace"), ""])
    try:
        next(rows)
    except csv.Error:
        return True
    return rows.line_num == 1
