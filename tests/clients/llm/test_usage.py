"""What a call used is read from every kind of answer, and from none that does not say it."""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clients.llm import usage as module
from seawall.clients.llm.estimate import PICTURE, body_of, estimate
from seawall.clients.llm.usage import (
    JsonReader,
    PendingUsage,
    Reader,
    SseReader,
    Unpacking,
    Usage,
    usage_of,
)
from tests.clients.llm.support import Vendor
from tests.support import examples, falsified

BYTES = st.binary(max_size=300) | st.lists(
    st.sampled_from(
        [b"data:", b'{"usage":', b"\n", b"\r", b"\n\n", b"event: error", b"[" * 50, b"}"]
    )
).map(b"".join)


def stream_of(path: str, *, include: bool = True) -> list[bytes]:
    """Return the events of a whole streamed answer."""
    asked = {"stream": True, "stream_options": {"include_usage": include}}
    return Vendor(used=(1234, 56)).answer(path, json.dumps(asked).encode(), {}).chunks


@pytest.mark.parametrize(
    ("answer", "usage"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}, (3, 4)),
        ({"usage": {"prompt_tokens": 3, "total_tokens": 3}}, (3, 0)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}}, (3, 4)),
        (
            {
                "usage": {
                    "input_tokens": 3,
                    "cache_creation_input_tokens": 2,
                    "cache_read_input_tokens": 9,
                    "output_tokens": 4,
                }
            },
            (5, 4, 9),
        ),
        ({"message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}, (3, None)),
        ({"response": {"usage": {"input_tokens": 3, "output_tokens": 1}}}, (3, 1)),
        ({"usage": {"input_tokens": -3, "output_tokens": True}}, (None, None)),
        ({"usage": {"input_tokens": 2.5, "output_tokens": 10**30}}, (None, None)),
        ({"usage": None}, (None, None)),
        ({"usage": [1]}, (None, None)),
        ("usage", (None, None)),
        (SimpleNamespace(usage=SimpleNamespace(input_tokens=1, output_tokens=2)), (1, 2)),
        (Usage(1, 2), (1, 2)),
        (None, (None, None)),
    ],
)
def test_usage_of_an_answer(answer: object, usage: tuple[Any, ...]) -> None:
    """Both dialects are understood, as JSON and as an SDK's objects; nonsense is not."""
    assert usage_of(answer) == Usage(*usage)


def test_an_answer_that_refuses_to_be_looked_at() -> None:
    """A property that fails is as good as none."""

    class Answer:
        @property
        def usage(self) -> int:
            raise RuntimeError("not now")

    assert not usage_of(Answer()).known


@given(st.sampled_from(["/v1/messages", "/v1/chat/completions"]), st.lists(st.integers(1, 400)))
def test_pieces_do_not_matter(path: str, sizes: list[int]) -> None:
    """However a stream is cut, the same is read from it."""
    whole = b"".join(stream_of(path))
    reader = SseReader()
    at = 0
    for size in sizes:
        reader.feed(whole[at : at + size])
        at += size
    reader.feed(whole[at:])
    assert reader.usage()[:2] == (1234, 56)
    assert reader.began
    assert reader.error is None


def test_a_stream_that_ends_early() -> None:
    """One vendor reports the input in the first event; the other all at the end."""
    for path, usage in {"/v1/messages": (1234, None), "/v1/chat/completions": (None, None)}.items():
        reader = SseReader()
        for chunk in stream_of(path)[:3]:
            reader.feed(chunk)
        assert reader.usage()[:2] == usage
    reader = SseReader()
    reader.feed(b"".join(stream_of("/v1/chat/completions", include=False)))
    assert not reader.usage().known


@pytest.mark.parametrize("ending", [b"\n", b"\r\n", b"\r"])
def test_an_event_ends_with_a_blank_line_wherever_it_is_cut(ending: bytes) -> None:
    """A ping that comes in pieces is not the first event: the error after it is."""
    lines = (b"event: ping", b'data: {"type": "ping"}', b"", b'data: {"error": {}}', b"", b"")
    for size in (1, 2, 3, 100):
        reader = SseReader()
        body = ending.join(lines) + b": more\n"
        for start in range(0, len(body), size):
            reader.feed(body[start : start + size])
        assert reader.error == {"error": {}}


def test_an_error_comes_first() -> None:
    """The first event is known to be an error; comments and pings are no events of that kind."""
    reader = SseReader()
    reader.feed(b': hello\n\nevent: ping\ndata: {"type": "ping"}\n\nevent: error\n')
    assert not reader.began
    reader.feed(b'data: {"type": "error",\ndata: "error": {"type": "overloaded_error"}}\r\n\r\n')
    assert reader.began
    assert reader.error == {"type": "error", "error": {"type": "overloaded_error"}}


def within_bounds(pieces: list[bytes]) -> None:
    """Check that readers keep a bounded amount of whatever they are fed."""
    events, whole = SseReader(), JsonReader()
    for piece in pieces:
        events.feed(piece * 40_000)
        whole.feed(piece * 40_000)
        kept = len(events._line) + sum(map(len, events._first))
        assert kept <= module.LONGEST_LINE + 2 * module.FIRST_EVENT
        assert len(whole._kept) <= module.WHOLE
    assert not events.usage().known


LINES = st.lists(st.sampled_from([b"d" * 9, b"data:x\n", b"\r", b": y"]), max_size=9)


@examples(40)
@given(LINES)
def test_readers_keep_little(pieces: list[bytes]) -> None:
    """A line without end, and a first event without end, are not kept."""
    within_bounds(pieces)


def test_without_their_bounds_readers_keep_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same check fails if a line may be of any length."""
    fed = SseReader.feed

    def feed(self: SseReader, data: bytes) -> None:
        fed(self, b"")
        self._line += data.replace(b"\n", b"")

    monkeypatch.setattr(SseReader, "feed", feed)
    assert falsified(within_bounds, LINES)


@given(st.lists(BYTES, max_size=6))
def test_anything_may_pass_by(pieces: list[bytes]) -> None:
    """Whatever comes, no reader raises, packed or not."""
    for reader in (SseReader(), JsonReader(), Unpacking(SseReader()), Unpacking(JsonReader())):
        for piece in pieces:
            reader.feed(piece)
        assert isinstance(reader.usage(), Usage)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_packed_bodies(pack: Any) -> None:
    """What is packed by gzip or deflate is read as well, in any pieces."""
    packed = pack(b"".join(stream_of("/v1/messages")))
    reader = Unpacking(SseReader())
    for at in range(0, len(packed), 7):
        reader.feed(packed[at : at + 7])
    assert reader.usage()[:2] == (1234, 56)


def test_large_bodies() -> None:
    """Of a large body the end is looked at; text that looks like usage is not taken for it."""
    filler = "x" * (module.WHOLE + 10)
    usage = {"prompt_tokens": 3, "completion_tokens": 4}
    reader = JsonReader()
    said = json.dumps({"text": filler + '"usage": {"prompt_tokens": 99}', "usage": usage})
    for at in range(0, len(said), 65_536):
        reader.feed(said[at : at + 65_536].encode())
    assert reader.usage()[:2] == (3, 4)
    reader = JsonReader()
    reader.feed(json.dumps({"usage": usage, "text": filler}).encode())
    assert not reader.usage().known


class Unpacked(Reader):
    """A reader that counts the bytes it is given."""

    def __init__(self) -> None:
        self.bytes = 0
        self.largest = 0

    def feed(self, data: bytes) -> None:
        self.bytes += len(data)
        self.largest = max(self.largest, len(data))

    def usage(self) -> Usage:
        return Usage(1, 1)


def test_decompression_is_bounded_in_output() -> None:
    """A body that unpacks to 256 MiB is given up at the bound; its usage is not known."""
    squeeze = zlib.compressobj(1)
    zeros = bytes(1 << 20)
    bomb = b"".join(squeeze.compress(zeros) for _ in range(256)) + squeeze.flush()
    counted = Unpacked()
    reader = Unpacking(counted)
    reader.feed(bomb)
    assert counted.bytes <= module.MOST_UNPACKED
    assert counted.largest <= 1 << 16
    assert not reader.usage().known
    reader.feed(bomb)
    assert counted.bytes <= module.MOST_UNPACKED


def test_a_large_answer_is_read_up_to_the_bound() -> None:
    """The usage is read from an answer of nearly the maximum size."""
    usage = b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}'
    squeeze = zlib.compressobj(1)
    blanks = b" " * (1 << 20)
    body = b"".join(squeeze.compress(blanks) for _ in range(63))
    body += squeeze.compress(usage) + squeeze.flush()
    reader = Unpacking(JsonReader())
    reader.feed(body)
    assert reader.usage()[:2] == (3, 4)


@pytest.mark.parametrize(
    "after",
    [
        b"garbage after the end",
        bytes(1 << 16),
        gzip.compress(b'{"usage": {"prompt_tokens": 999, "completion_tokens": 999}}') * 3,
    ],
    ids=["garbage", "zeros", "members"],
)
def test_decompression_stops_at_the_end_of_the_stream(after: bytes) -> None:
    """Whatever follows the first gzip member is neither read nor kept."""
    body = gzip.compress(b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}')
    for step in (1, 7, 1 << 20):
        reader = Unpacking(JsonReader())
        sent = body + after[: 300 * step]
        for at in range(0, len(sent), step):
            reader.feed(sent[at : at + step])
        for _ in range(3):
            reader.feed(after)
        assert reader.usage()[:2] == (3, 4)
        assert len(reader._inflate.unused_data) <= max(step, 1 << 16)


def test_bytes_after_the_end_are_not_decompressed() -> None:
    """After the end, zlib gets no more input: it would collect all of it, in quadratic time."""
    reader = Unpacking(JsonReader())
    reader.feed(gzip.compress(b"{}"))
    for _ in range(100):
        reader.feed(bytes(1000))
    assert reader._inflate.unused_data == b""


def test_a_large_piece_is_decompressed_in_linear_time() -> None:
    """However large the piece, each step copies at most one small slice of it."""
    body = zlib.compress(random.Random(1).randbytes(4 << 20), 0)
    tails = []

    class Spy:
        def __init__(self, inflate: Any) -> None:
            self._inflate = inflate
            self.eof = False

        def decompress(self, data: bytes, most: int) -> bytes:
            unpacked: bytes = self._inflate.decompress(data, most)
            tails.append(len(self.unconsumed_tail))
            return unpacked

        @property
        def unconsumed_tail(self) -> bytes:
            return self._inflate.unconsumed_tail

    reader = Unpacking(Unpacked())
    reader._inflate = Spy(reader._inflate)
    reader.feed(body)
    assert max(tails) < 1 << 16
    assert len(tails) < 300


def test_reading_is_linear() -> None:
    """Four times the stream takes about four times the time of the processor, not sixteen."""
    event = stream_of("/v1/chat/completions")[0]

    def seconds(events: int) -> float:
        took = []
        for _ in range(10):
            reader = SseReader()
            began = time.thread_time()
            for _ in range(events):
                reader.feed(event)
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(4_000) < 12 * seconds(1_000)


def test_told_once() -> None:
    """The usage is reported once, also if the body ends and is closed afterwards."""
    told: list[Usage] = []
    late = PendingUsage(JsonReader())
    late.then(told.append)
    late.feed(b'{"usage": {"input_tokens": 1, ')
    late.feed(b'"output_tokens": 2}}')
    assert told == []
    late.end()
    late.end()
    assert told == [Usage(1, 2)]
    late.then(told.append)
    assert told == [Usage(1, 2)] * 2


@pytest.mark.parametrize(
    ("body", "guess"),
    [
        ({"messages": [{"role": "u", "content": "seven"}], "max_tokens": 9}, (2, 9)),
        ({"prompt": "four", "max_tokens": 9, "n": 3}, (1, 27)),
        ({"prompt": [1, 2, 3]}, (3, 1024)),
        ({"input": "12345678", "encoding_format": "float"}, (2, 0)),
        ({"input": "12345678", "max_output_tokens": 5}, (2, 5)),
        ({"system": "abcd", "messages": [], "max_tokens": -1}, (1, 1024)),
        ({"file": "x"}, (0, 0)),
        ({"messages": [{"source": {"type": "base64", "data": "x" * 9999}}]}, (PICTURE, 1024)),
        ({"messages": [{"image_url": {"url": "data:x" * 9999}}]}, (PICTURE, 1024)),
        ({"messages": [{"input_audio": {"data": "x" * 9999, "format": "wav"}}]}, (PICTURE, 1024)),
    ],
)
def test_estimates(body: dict[str, Any], guess: tuple[int, int]) -> None:
    """Four letters are a token, a picture a fixed number of them; the answer as long as it may."""
    assert estimate(body, None, 1024)[:2] == guess


def test_estimates_by_the_users_own_count() -> None:
    """A function of the user's knows better; what it returns is checked."""
    assert estimate({"prompt": "x", "model": "m"}, lambda _: 77, 5) == (77, 5, "m")
    with pytest.raises(ValueError, match="write 0 or more"):
        estimate({"prompt": "x"}, lambda _: -1, 5)
    assert body_of(("hello",), {"max_tokens": 3}) == {"prompt": ["hello"], "max_tokens": 3}
    assert body_of(({"prompt": "x"},), {}) == {"prompt": "x"}
