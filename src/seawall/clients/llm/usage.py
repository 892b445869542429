"""Token usage of a call: read from responses, whole or streamed, without changing them.

Both vendors' formats are supported. Responses are untrusted: a reader never raises, keeps a bounded
amount of data, and reports an unknown usage if it does not understand the data.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

MOST: Final = 2**40
"""Maximum plausible number of tokens."""

WHOLE: Final = 1 << 20
"""Maximum number of bytes of a body that is parsed completely; only the end of a larger one is
searched."""

TAIL: Final = 1 << 14
LONGEST_LINE: Final = 1 << 20
FIRST_EVENT: Final = 1 << 16
"""Maximum length of the first event of a stream that is inspected."""

MOST_UNPACKED: Final = 1 << 26
"""Maximum size of a decompressed body, in bytes. The usage of a larger one is not known."""

LONGEST_NAME: Final = 120
"""Maximum length of a model's name."""

_DECODED_AT_ONCE: Final = 1 << 16


class Usage(NamedTuple):
    """The tokens that a call used; None where it is not known."""

    input: int | None = None
    output: int | None = None
    cached: int = 0
    """Tokens of the prompt that were read from a cache, if they are not part of `input`."""
    cached_input: int = 0
    """Tokens of the prompt that were read from a cache, if they are part of `input`."""

    @property
    def total(self) -> int | None:
        """Input plus output, if both are known."""
        return None if self.input is None or self.output is None else self.input + self.output

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return self.input is not None or self.output is not None


UNKNOWN: Final = Usage()
NONE_USED: Final = Usage(0, 0)


def usage_of(answer: object) -> Usage:
    """Return the usage in `answer`: an SDK's response, its JSON, or one event of a stream."""
    if isinstance(answer, Usage):
        return answer
    for inside, where in _places(answer):
        usage = _get(where, "usage")
        if usage is not None:
            found = _read(usage)
            # The first event of one vendor reports the input, and only the start of the output.
            return found._replace(output=None) if inside == "message" else found
    return UNKNOWN


def _places(answer: object) -> Iterator[tuple[str, Any]]:
    """Yield where usage and model may be: in `answer` itself, or in one of its parts."""
    yield "", answer
    for inside in ("message", "response"):
        where = _get(answer, inside)
        if where is not None:
            yield inside, where


def _read(usage: object) -> Usage:
    went_in, cached = _count(usage, "prompt_tokens"), 0
    if went_in is None:
        went_in = _count(usage, "input_tokens")
        if went_in is not None:
            went_in += _count(usage, "cache_creation_input_tokens") or 0
            cached = _count(usage, "cache_read_input_tokens") or 0
    came_out = _count(usage, "completion_tokens")
    if came_out is None:
        came_out = _count(usage, "output_tokens")
    total = _count(usage, "total_tokens")
    details = _get(usage, "prompt_tokens_details") or _get(usage, "input_tokens_details")
    cached_input = 0 if details is None else _count(details, "cached_tokens") or 0
    if total is not None and went_in is not None and came_out is None:
        came_out = max(0, total - went_in)  # embeddings have no output
    return Usage(went_in, came_out, cached, min(cached_input, went_in or 0))


def model_of(answer: object) -> str:
    """Return the model named in `answer` (a response, its JSON, or one event), or ""."""
    names = (name_of(_get(where, "model")) for _, where in _places(answer))
    return next(filter(None, names), "")


def name_of(model: object) -> str:
    """Return the name of a model if it is plausible: short, printable text; else ""."""
    known = isinstance(model, str) and len(model) <= LONGEST_NAME and model.isprintable()
    return str(model) if known else ""


def _get(of: object, name: str) -> Any:
    if isinstance(of, Mapping):
        return of.get(name)
    if isinstance(of, (str, bytes, int, float, list, tuple)):
        return None
    try:
        return getattr(of, name, None)
    except Exception:  # noqa: BLE001 - a failing property counts as unknown
        return None


def _count(usage: object, name: str) -> int | None:
    number = _get(usage, name)
    return number if type(number) is int and 0 <= number <= MOST else None


LONGEST_TYPE: Final = 64
"""Maximum number of characters of an error's type that are kept."""


class Reader:
    """Inspects a body as it is read."""

    model = ""
    """The model that answers, once it is known."""
    failure = ""
    """The type of an error after the start of the response; empty if there was none."""

    def feed(self, data: bytes) -> None:
        """Inspect the next chunk."""
        raise NotImplementedError

    def usage(self) -> Usage:
        """Return the usage known so far."""
        raise NotImplementedError


class JsonReader(Reader):
    """Reader of a body that is one JSON value."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._whole = True

    def feed(self, data: bytes) -> None:
        """Keep the chunk; keep only the end of a large body."""
        self._kept += data
        if len(self._kept) > WHOLE:
            self._whole = False
            del self._kept[:-TAIL]

    def usage(self) -> Usage:
        """Return the usage in the body."""
        if self._whole:
            answer = parsed(bytes(self._kept))
            self.model = model_of(answer)
            return usage_of(answer)
        end = self._kept[-TAIL:].decode("utf-8", "replace")
        # Inside strings a quotation mark is escaped, so this is a key: the last one of that name.
        place = end.rfind('"usage":')
        if place < 0:
            return UNKNOWN
        try:
            found, _ = json.JSONDecoder().raw_decode(end[place + 8 :].lstrip())
        except (ValueError, RecursionError):
            return UNKNOWN
        return usage_of({"usage": found})


class SseReader(Reader):
    """Reader of a stream of events, for usage and errors.

    It keeps only an unfinished line and, until it is complete, the first event.
    """

    def __init__(self) -> None:
        self._line = bytearray()
        self._skipping = False
        self._usage = UNKNOWN
        self._first: list[bytes] = []
        self._gathered = 0
        self.began = False
        """Whether the first event has arrived."""
        self.error: dict[str, Any] | None = None
        """The first event, if it is an error."""

    def feed(self, data: bytes) -> None:
        """Inspect the next chunk."""
        # A "\r" at the end may be the first half of a line's end.
        end = max(data.rfind(b"\n"), data.rfind(b"\r", 0, -1)) + 1
        if end:
            whole = data[:end] if self._skipping else bytes(self._line) + data[:end]
            self._line.clear()
            self._skipping = False
            if not self.began:
                self._begin(whole)
            # Most events contain neither: they cost no more than these searches.
            if b'"usage"' in whole or b'"error"' in whole:
                for line in whole.splitlines():
                    self._look(line)
        self._line += data[end:]
        if len(self._line) > LONGEST_LINE:
            self._line.clear()
            self._skipping = True

    def _look(self, line: bytes) -> None:
        if b'"error"' in line and line.startswith(b"data:"):
            self.failure = _failure_in(parsed(line[5:])) or self.failure
        if (
            line.startswith(b"data:")
            and b'"usage"' in line
            and b'"usage":null' not in line
            and b'"usage": null' not in line
        ):
            new = usage_of(parsed(line[5:]))
            known = self._usage if new.input is None else new
            self._usage = known._replace(
                output=self._usage.output if new.output is None else new.output
            )

    def _begin(self, lines: bytes) -> None:
        """Collect the first event; keep-alive comments and pings do not count."""
        for line in lines[:FIRST_EVENT].splitlines():
            self._gathered += len(line) + 1
            if line:
                self._first.append(line)
            elif self._is_first():
                return
        if self._gathered >= FIRST_EVENT:
            self.began = True
            self._first = []

    def _is_first(self) -> bool:
        """Return whether the collected lines are an event; inspect it if so."""
        gathered, self._first = self._first, []
        data = b"\n".join(line[5:] for line in gathered if line.startswith(b"data:"))
        kinds = [line[6:].strip() for line in gathered if line.startswith(b"event:")]
        if not data or b"ping" in kinds:
            return False
        self.began = True
        event = parsed(data)
        self.model = model_of(event)
        if isinstance(event, dict) and isinstance(event.get("error"), dict):
            self.error = event
        return True

    def usage(self) -> Usage:
        """Return the usage in the events so far."""
        return self._usage


def _failure_in(event: Any) -> str:
    """Return the type of the error in an event, "error" if it has no type; "" without error."""
    for place in (event, event.get("response")) if isinstance(event, dict) else ():
        error = place.get("error") if isinstance(place, dict) else None
        if isinstance(error, dict):
            names = (error.get("type"), error.get("code"))
            kinds = (one for one in names if isinstance(one, str) and one.isidentifier())
            return next(kinds, "error")[:LONGEST_TYPE]
    return ""


class Unpacking(Reader):
    """Decompressor of a gzip or deflate body for another reader.

    It stops at the end of the compressed stream, as HTTP clients do: a second member, or garbage
    after the end, is not read. After `MOST_UNPACKED` bytes of output it gives up.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._inflate: Any = zlib.decompressobj(zlib.MAX_WBITS | 32)
        self._room = MOST_UNPACKED

    def feed(self, data: bytes) -> None:
        """Decompress the next piece in small steps: little input may become a lot of output."""
        # In slices, since each step copies the input that is left: a large piece would take
        # quadratic time.
        for start in range(0, len(data), _DECODED_AT_ONCE):
            piece = data[start : start + _DECODED_AT_ONCE]
            while piece:
                # After the end zlib would collect all further input, in quadratic time.
                if self._inflate is None or self._inflate.eof:
                    return
                piece = self._step(piece)

    def _step(self, piece: bytes) -> bytes:
        """Decompress some of `piece`; return the rest of it."""
        try:
            unpacked = self._inflate.decompress(piece, _DECODED_AT_ONCE)
        except zlib.error:
            self._inflate = None
            return b""
        rest: bytes = self._inflate.unconsumed_tail
        self._room -= len(unpacked)
        if self._room < 0:
            self._inflate = None
            return b""
        self._reader.feed(unpacked)
        return rest

    def usage(self) -> Usage:
        """Return the usage of the inner reader; unknown if the body could not be decompressed."""
        usage = UNKNOWN if self._inflate is None else self._reader.usage()
        self.model, self.failure = self._reader.model, self._reader.failure
        return usage


class PendingUsage:
    """The usage of a response, which is known when its body was read; reported once."""

    def __init__(self, reader: Reader | None, usage: Usage | None = None) -> None:
        """Read the usage with `reader`, unless it is known from the start."""
        self.model = ""
        """The model that answered, known together with the usage."""
        self.error = ""
        """The name of the exception that interrupted the body, or of the error at its end. Empty if
        there was none."""
        self._reader = reader
        self._then: list[Callable[[Usage], None]] = []
        self._usage = usage

    def feed(self, data: bytes) -> None:
        """Inspect a chunk of the body."""
        if self._reader is not None:
            self._reader.feed(data)

    def end(self) -> None:
        """Report the usage: the body has ended, or the rest is not needed."""
        if self._usage is None:
            self._usage = UNKNOWN if self._reader is None else self._reader.usage()
            if self._reader is not None:
                self.model = self._reader.model
                self.error = self.error or self._reader.failure
            self._reader = None
        while self._then:
            try:
                then = self._then.pop()  # atomic: only one of two threads gets it
            except IndexError:
                return
            try:
                then(self._usage)
            except Exception:
                import logging

                # A failure of a limit must not affect the reader of the body.
                logging.getLogger("seawall").exception("the usage could not be settled")

    def then(self, callback: Callable[[Usage], None]) -> None:
        """Call `callback` with the usage, once it is known."""
        self._then.append(callback)
        if self._usage is not None:
            self.end()


def parsed(data: bytes) -> Any:
    """Return the JSON value, or None if it is invalid."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
