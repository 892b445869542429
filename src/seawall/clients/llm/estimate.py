"""What a call will use, guessed before it is sent: by its prompt, and the most it may answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from typing import Any, Final, NamedTuple

from seawall import _checks as check
from seawall.clients.llm.usage import MOST, parsed

LETTERS: Final = 4
"""Letters that make a token, in English; other scripts need more tokens: see `count=`."""

PICTURE: Final = 1_600
"""Tokens of a picture or another file that is sent along: about what a large picture costs."""

_PROMPT: Final = ("messages", "input", "prompt", "system", "instructions", "tools", "functions")
_ANSWER: Final = ("max_completion_tokens", "max_output_tokens", "max_tokens")

_FREE: Final = ("/count_tokens", "/input_tokens", "/moderations", "/cancel")
"""Ends of paths where a POST uses no tokens: it counts them, judges a text, or stops a call."""

Body = Mapping[str, Any]
Count = Callable[[Body], int]


class Estimate(NamedTuple):
    """What a call may use."""

    input: int
    output: int
    model: str = ""


class Asked:
    """A request on its way through a transport: its body, and what was guessed from it."""

    __slots__ = ("body", "free", "guesses")

    def __init__(self, content: bytes, *, free: bool) -> None:
        """Read the request as JSON; its body is empty if it is none. `free`: no tokens are used."""
        body = parsed(content) if content else None
        self.free = free
        self.body: Body = body if isinstance(body, dict) else {}
        self.guesses: dict[object, Estimate] = {}


ASKED: Final = "seawall.llm.asked"
"""Where a request's extensions keep what was asked, for all attempts."""


def asked_by(args: tuple[Any, ...]) -> Asked | None:
    """Return what is asked, if the call's argument is a request of httpx or httpx2."""
    request: Any = args[0] if args else None
    extensions = getattr(request, "extensions", None)
    if not isinstance(extensions, dict) or not hasattr(request, "stream"):
        return None
    asked = extensions.get(ASKED)
    if not isinstance(asked, Asked):
        try:
            content = request.content
        except Exception:  # noqa: BLE001 - it is a stream, which can be read once: not here
            content = b""
        asked = extensions[ASKED] = Asked(content, free=is_free(request))
    return asked


def is_free(request: Any) -> bool:
    """Tell whether a request of httpx or httpx2 uses no tokens, whatever its answer says."""
    return bool(request.method != "POST" or request.url.path.rstrip("/").endswith(_FREE))


def body_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Body:
    """Return the request of a call with these arguments: by name, a mapping, or plain text."""
    if any(name in kwargs for name in _PROMPT):
        return kwargs
    for argument in args:
        if isinstance(argument, Mapping):
            return argument
    texts = [argument for argument in args if isinstance(argument, str)]
    return {**kwargs, "prompt": texts}


def estimate(body: Body, count: Count | None, output: int) -> Estimate:
    """Guess what the request of that `body` uses; `output` where it does not limit its answer."""
    model = body.get("model")
    if not any(name in body for name in _PROMPT):
        return Estimate(0, 0, model if isinstance(model, str) else "")
    went_in = _tokens(body) if count is None else check.count("count(...)", count(body), minimum=0)
    if "input" in body and "encoding_format" in body:
        output = 0  # embeddings
    for name in _ANSWER:
        most = body.get(name)
        if type(most) is int and 0 <= most <= MOST:
            answers = body.get("n")
            output = most * (answers if type(answers) is int and 1 < answers < MOST else 1)
            break
    return Estimate(went_in, output, model if isinstance(model, str) else "")


def _tokens(body: Body) -> int:
    """Return about how many tokens the prompt is: a token for so many letters, rounded up."""
    letters = tokens = 0
    waiting: list[Any] = [body[name] for name in _PROMPT if name in body]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            letters += len(part)
        elif isinstance(part, Mapping):
            if _is_file(part):
                tokens += PICTURE
            else:
                waiting.extend(part.values())
        elif isinstance(part, (list, tuple)):
            if part and all(type(item) is int for item in part):
                tokens += len(part)  # tokens already
            else:
                waiting.extend(part)
    return tokens + ceil(letters / LETTERS)


def _is_file(part: Mapping[str, Any]) -> bool:
    """Tell whether this is a picture or another file: its letters are no text."""
    if part.get("type") == "base64" or "b64_json" in part:
        return True
    if isinstance(part.get("data"), str) and isinstance(part.get("format"), str):
        return True  # sound
    return any(
        isinstance(part.get(name), str) and part[name].startswith("data:")
        for name in ("url", "image_url", "file_data")
    )
