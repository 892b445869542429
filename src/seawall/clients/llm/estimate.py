"""Estimate of a call's usage before it is sent: from its prompt and its maximum output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, Final, NamedTuple, Protocol

from seawall import _checks as check
from seawall.clients.llm.usage import MOST, parsed

LETTERS: Final = 4
"""Characters per token, in English; other scripts need more tokens: see `count=`."""

PICTURE: Final = 1_600
"""Tokens of an attached picture or another file: about the cost of a large picture."""

FRAME: Final = 3
"""Tokens around each message of a chat, and at the beginning of the answer."""

_PROMPT: Final = ("messages", "input", "prompt", "system", "instructions", "tools", "functions")
_ANSWER: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")

_FREE: Final = ("/count_tokens", "/input_tokens", "/moderations", "/cancel")
"""Path suffixes where a POST uses no tokens: it counts tokens, moderates text or cancels a call."""

Body = Mapping[str, Any]
Count = Callable[[Body], int]


class TextEncoding(Protocol):
    """What turns text into tokens, such as an `Encoding` of tiktoken."""

    def encode_ordinary(self, text: str, /) -> Sequence[int]:
        """Return the tokens of `text`, none of which is special."""
        ...


def counter_of(count: Count | TextEncoding | None) -> Count | None:
    """Return the function that counts the tokens of a prompt, or raise."""
    if count is None:
        return None
    if not isinstance(count, type) and hasattr(count, "encode_ordinary"):
        return partial(_encoded, count)
    if isinstance(count, type) or not callable(count):
        raise TypeError(
            f"count={count!r}: pass a function of the request's body, or an encoding of tiktoken"
        )
    return check.plain_function("count", count)


class TokenEstimate(NamedTuple):
    """Estimated usage of a call."""

    input: int
    output: int
    model: str = ""


class ParsedRequest:
    """A request in a transport: its body, and the estimates made from it."""

    __slots__ = ("body", "estimates", "free")

    def __init__(self, content: bytes, *, free: bool) -> None:
        """Parse the request; the body is empty if it is not JSON. `free`: no tokens are used."""
        body = parsed(content) if content else None
        self.free = free
        self.body: Body = body if isinstance(body, dict) else {}
        self.estimates: dict[object, TokenEstimate] = {}


PARSED_REQUEST: Final = "seawall.llm.request"
"""Extension of a request that holds its `ParsedRequest`, for all attempts."""


def parsed_request(args: tuple[Any, ...]) -> ParsedRequest | None:
    """Return the parsed request, if the call's argument is a request of httpx or httpx2."""
    request: Any = args[0] if args else None
    extensions = getattr(request, "extensions", None)
    if not isinstance(extensions, dict) or not hasattr(request, "stream"):
        return None
    found = extensions.get(PARSED_REQUEST)
    if not isinstance(found, ParsedRequest):
        try:
            content = request.content
        except Exception:  # noqa: BLE001 - a stream can be read only once: not here
            content = b""
        found = extensions[PARSED_REQUEST] = ParsedRequest(content, free=is_free(request))
    return found


def is_free(request: Any) -> bool:
    """Return whether a request of httpx or httpx2 uses no tokens, whatever its response says."""
    return bool(request.method != "POST" or request.url.path.rstrip("/").endswith(_FREE))


def body_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Body:
    """Return the request body from a call's arguments: by name, a mapping, or plain text."""
    if any(name in kwargs for name in _PROMPT):
        return kwargs
    for argument in args:
        if isinstance(argument, Mapping):
            return argument
    texts = [argument for argument in args if isinstance(argument, str)]
    return {**kwargs, "prompt": texts}


def estimate(body: Body, count: Count | None, output: int) -> TokenEstimate:
    """Estimate the usage for `body`; `output` applies if the request does not limit its output."""
    model = body.get("model")
    if not any(name in body for name in _PROMPT):
        return TokenEstimate(0, 0, model if isinstance(model, str) else "")
    went_in = _tokens(body) if count is None else check.count("count(...)", count(body), minimum=0)
    if "input" in body and "encoding_format" in body:
        output = 0  # embeddings
    for name in _ANSWER:
        most = body.get(name)
        if type(most) is int and 0 <= most <= MOST:
            answers = body.get("n")
            output = most * (answers if type(answers) is int and 1 < answers < MOST else 1)
            break
    return TokenEstimate(went_in, output, model if isinstance(model, str) else "")


def _tokens(body: Body) -> int:
    """Return the approximate number of tokens of the prompt, rounded up."""
    texts, tokens = _parts(body)
    return tokens + ceil(sum(map(len, texts)) / LETTERS)


def _encoded(encoding: TextEncoding, body: Body) -> int:
    """Return the number of tokens of the prompt by the vendor's own vocabulary."""
    texts, tokens = _parts(body)
    messages = body.get("messages")
    if isinstance(messages, (list, tuple)):
        tokens += FRAME * (len(messages) + 1)
    return tokens + sum(len(encoding.encode_ordinary(text)) for text in texts)


def _parts(body: Body) -> tuple[list[str], int]:
    """Return the texts of the prompt, and the tokens of what is no text: files and token ids."""
    texts: list[str] = []
    tokens = 0
    waiting: list[Any] = [body[name] for name in _PROMPT if name in body]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, Mapping):
            if _is_file(part):
                tokens += PICTURE
            else:
                waiting.extend(part.values())
        elif isinstance(part, (list, tuple)):
            if part and all(type(item) is int for item in part):
                tokens += len(part)  # token ids
            else:
                waiting.extend(part)
    return texts, tokens


def _is_file(part: Mapping[str, Any]) -> bool:
    """Return whether this is a picture or another file: its characters are not text."""
    if part.get("type") == "base64" or "b64_json" in part:
        return True
    if isinstance(part.get("data"), str) and isinstance(part.get("format"), str):
        return True  # audio
    return any(
        isinstance(part.get(name), str) and part[name].startswith("data:")
        for name in ("url", "image_url", "file_data")
    )
