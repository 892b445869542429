"""Tokens counted by an encoding of tiktoken: a real `Encoding`, with a vocabulary of its own.

The vocabularies of vendors are fetched from the network, so these tests make a small one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from seawall import RateLimited
from seawall.clients.llm import TokenLimits, async_http_client
from seawall.clients.llm.estimate import FRAME, PICTURE
from seawall.testing import run_virtual
from tests.clients.llm.support import Vendor
from tests.support import new_guard

RANKS = {bytes([byte]): byte for byte in range(256)}
RANKS |= {b"he": 256, b"ll": 257, b"llo": 258, b"hello": 259, b"us": 260, b"er": 261, b"user": 262}
TINY = tiktoken.Encoding(
    "tiny",
    pat_str=r"\w+|\s+|[^\w\s]+",
    mergeable_ranks=RANKS,
    special_tokens={"<|end|>": 300},
)


def asked(limits: TokenLimits, **body: Any) -> int:
    """Return how many tokens go in, by the estimate."""
    return limits._estimate_of((), body).input


def limits_by(count: Any) -> TokenLimits:
    return TokenLimits(tokens="10k/week", count=count)


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


@pytest.mark.parametrize(
    ("text", "tokens"), [("hello", 1), ("hello hello", 3), ("日本", 6), ("<|end|>", 7), ("", 0)]
)
def test_a_prompt_has_as_many_tokens_as_the_encoding_says(text: str, tokens: int):
    """Also in other scripts, and where the text looks like a special token."""
    assert asked(limits_by(TINY), prompt=text) == tokens
    assert asked(limits_by(TINY), messages=chat(text)) == 1 + tokens + 2 * FRAME
    assert asked(limits_by(TINY), messages=chat(text, text)) == 2 * (1 + tokens) + 3 * FRAME


def test_without_it_letters_are_counted():
    """A token for each four letters is far too low for a script that needs several a letter."""
    assert asked(limits_by(None), prompt="日本" * 20) == 10
    assert asked(limits_by(TINY), prompt="日本" * 20) == 120


def test_pictures_and_token_ids_count_as_without_it():
    """What is no text is not encoded."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
    parts = [{"type": "text", "text": "hello"}, picture]
    found = asked(limits_by(TINY), messages=[{"role": "user", "content": parts}])
    types = sum(len(TINY.encode_ordinary(word)) for word in ("text", "image_url"))
    assert found == PICTURE + 1 + types + 1 + 2 * FRAME  # the types of parts count as text
    assert asked(limits_by(TINY), prompt=[1, 2, 3, 4]) == 4


@given(st.text(max_size=200))
def test_no_text_is_refused_by_the_counter(text: str):
    """Whatever users write is counted, as the encoding does, and never raises."""
    limits = limits_by(TINY)
    wanted = len(TINY.encode_ordinary(text))
    assert asked(limits, prompt=text) == wanted
    assert asked(limits, prompt=text + "\ud800") >= wanted  # half a character, as JSON can have it


def test_whatever_encodes_is_taken():
    """An object with `encode_ordinary` is enough: nothing here imports tiktoken."""

    class Words:
        def encode_ordinary(self, text: str) -> Sequence[int]:
            return [len(word) for word in text.split()]

    assert asked(limits_by(Words()), prompt="one two three") == 3
    with pytest.raises(TypeError, match="encoding"):
        limits_by(5)
    with pytest.raises(TypeError, match="encoding"):
        limits_by(tiktoken.Encoding)


def test_a_request_that_would_exceed_the_limit_is_not_sent():
    """By the HTTP client: what the encoding counts decides, and the vendor's usage settles it."""
    vendor = Vendor(used=(7, 5))

    async def main() -> None:
        limits = TokenLimits(tokens="100/week", count=TINY)
        guard = new_guard(limits)
        url, body = "http://v/v1/chat/completions", {"model": "m", "max_tokens": 10}
        async with async_http_client(guard, vendor.transport()) as http:
            sent = await http.post(url, json={**body, "messages": chat("hello " * 20)})
            assert sent.status_code == 200
            (shown,) = guard.snapshot()["policies"]
            assert shown["limits"]["tokens"]["left"] == 100 - 12
            with pytest.raises(RateLimited):  # 90 tokens by the encoding, 24 by letters
                await http.post(url, json={**body, "messages": chat("日" * 30)})
        assert vendor.asked == 1

    run_virtual(main())
