"""Text made safe to log, store and show: without secrets, on one line, short.

Promises:
- Of a URL only scheme, host and port are left. User, password, path and query may be secrets,
  whatever characters they contain. The same holds for `user:password@host`, `user/password@host`
  and `?query`.
- Values named like secrets (`password=`, `"api_key":`, `token:`) are hidden, and so are the values
  of headers that carry credentials (`Authorization:`, `Cookie:`, `X-Api-Key:`), up to the end of
  the line if a colon precedes them.
- If in doubt, it hides too much.
- No line break or control character is left. Nothing is longer than requested.
- All of it takes linear time, and never raises.
"""

from __future__ import annotations

import re
from typing import Final

LONGEST: Final = 200  # default maximum length of a line, in characters
_EXAMINED: Final = 4_000  # maximum length of a text that is examined, in characters

_HIDDEN: Final = "***"
_CLOSING: Final = "'\"`<>()[]{},.;:"  # these end a sentence or a quotation, not a URL

# These two match only at the beginning of a word, or a search would take quadratic time.
_ADDRESS: Final = re.compile(r"(?<!\S)(\S*?)://(\S*)")
_LOGIN: Final = re.compile(r"(?<!\S)[^\s:/]*[:/]\S*@\S*")
_END_OF_HOST: Final = re.compile(r"[/?#\\'\"`<>(){},;]")
_END_OF_LOGIN: Final = re.compile(r"[/?#]")
_HOST: Final = re.compile(r"(?:\[[0-9a-zA-Z:.%]*\]|[^:\[\]]*)(?::[0-9]*)?")
_PATH: Final = re.compile(r"(url: )/(\S*)")
_QUERY: Final = re.compile(r"\?\S+")

# It begins with plain letters, and the text is lowercased first: that makes the search much faster.
_NAMED: Final = re.compile(
    r"(?:authorization|cookie|pass(?:word|wd|phrase)?|pwd|secret(?:[-_ ]?key)?|token|credentials?"
    r"|api[-_ ]?key|access[-_ ]?key|private[-_ ]?key|account[-_ ]?key|signature|sig|auth"
    r"|bearer|basic)"
    r"(?:(?P<colon>\\{0,3}[\"']?\s{0,3}:\s*|\\{0,3}[\"'],\s*)[^\s][^\n]*"
    # A quoted value ends at the last quote of the line, as it may contain quotes itself.
    r"|(?P<equals>\\{0,3}[\"']?\s{0,3}=\s{0,3})"
    r"(?:b?\\{0,3}(?P<quote>[\"'])(?:[^\n]*(?P=quote)\S*|[^\n]*)|[(\[{][^\n]*"
    r"|(?:bearer|basic|digest|negotiate|token)\s[^\n]*|\S+(?:(?<=\\)\s\S*)*)"
    r"|(?P<bearer>(?<=bearer)\s{1,3})[^\s][^\n]*"
    r"|(?P<basic>(?<=basic)\s{1,3})[a-z0-9+/=]{8,}[^\n]*)"
)
_KEPT: Final = ("colon", "equals", "bearer", "basic")  # the kept part ends with one of these


def redacted(text: str) -> str:
    """Return `text` with everything hidden that may be a secret."""
    if "://" in text:
        text = _ADDRESS.sub(_host_only, text)
    text = _without_named(text)
    text = _PATH.sub(_path_hidden, text)
    if "@" in text:
        text = _LOGIN.sub(_login_hidden, text)
    return _QUERY.sub(_query_hidden, text)


def printable(text: str, longest: int) -> str:
    """Return `text` with unprintable characters escaped, of at most `longest` characters."""
    if len(text) <= longest and text.isprintable():
        return text
    escaped = "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii")
        for one in text[: longest + 1]
    )
    return escaped if len(escaped) <= longest else f"{escaped[: longest - 1]}…"


def safe_line(text: str, longest: int = LONGEST) -> str:
    """Return the first line of `text`, safe and short: drivers list parameters on the others."""
    examined = text[:_EXAMINED].strip()
    line = (examined.splitlines() or [""])[0].rstrip()
    if len(text) > _EXAMINED and line == examined:
        # The last word may be half of a URL, whose password can no longer be recognised as one.
        line = f"{line.rpartition(' ')[0]} …"
    return printable(redacted(line), longest)


def safe_text(text: str) -> str:
    """Return the beginning of `text`, redacted, with its line breaks."""
    if len(text) > _EXAMINED:  # the last word may be half of a URL, as above
        text = f"{text[:_EXAMINED].rpartition(' ')[0]} …"
    return redacted(text)


def _split_closing(run: str) -> tuple[str, str]:
    """Return `run` without its trailing punctuation, and that punctuation."""
    kept = run.rstrip(_CLOSING)
    return kept, run[len(kept) :]


def _host_only(found: re.Match[str]) -> str:
    scheme = found[1]
    address, closing = _split_closing(found[2])
    login, at, rest = address.rpartition("@")
    if at and (":" in scheme or "/" in scheme):  # the `://` may be part of a password
        return f"{_HIDDEN}{closing}"
    host = _END_OF_HOST.split(rest, maxsplit=1)[0]
    # Before the `@` is a password with a slash in it, or a host and a path: show neither. And text
    # that does not look like a host may be a user and half of a password.
    if _END_OF_LOGIN.search(login) or _HOST.fullmatch(host) is None:
        return f"{scheme}://{_HIDDEN}{closing}"
    more = "/..." if len(host) < len(rest) else ""
    return f"{scheme}://{host}{more}{closing}"


def _login_hidden(found: re.Match[str]) -> str:
    login, _, rest = found[0].rpartition("@")
    if _END_OF_LOGIN.search(login):  # as in `_host_only`
        return f"{_HIDDEN}{_split_closing(rest)[1]}"
    return f"{_HIDDEN}@{rest}"


def _path_hidden(found: re.Match[str]) -> str:
    return f"{found[1]}/...{_split_closing(found[2])[1]}"


def _query_hidden(found: re.Match[str]) -> str:
    query, closing = _split_closing(found[0][1:])
    return f"?...{closing}" if query else found[0]


def _without_named(text: str) -> str:
    """Return `text` without the values of named secrets and of credential headers."""
    folded = text.lower()
    if len(folded) != len(text):  # some letters become two: then positions differ
        text = folded
    kept: list[str] = []
    end = 0
    for found in _NAMED.finditer(folded):
        value = max(found.end(group) for group in _KEPT)
        kept += (text[end:value], _HIDDEN)
        end = found.end()
    return text if not kept else "".join(kept) + text[end:]
