"""Criticality and tenant of a request, as members of W3C `baggage`.

Only the members `seawall.criticality` and `seawall.tenant` are read and written. The rest of a
baggage header stays unchanged, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import quote, unquote

from seawall.context import Criticality
from seawall.wire.text import LONGEST, text_of

BAGGAGE_HEADER: Final = "baggage"
"""W3C Baggage, with the two members below; the others pass through unchanged."""
CRITICALITY_KEY: Final = "seawall.criticality"
"""Member of `baggage`: `sheddable`, `sheddable-plus`, `critical` or `critical-plus`."""
TENANT_KEY: Final = "seawall.tenant"
"""Member of `baggage`: the tenant, 1 to 255 printable characters, percent-encoded."""
_MOST_MEMBERS: Final = 64
_LONGEST_TENANT: Final = 255
_KEY: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
# Any visible character except quote, percent, comma, semicolon and backslash; or an escape.
_VALUE: Final = re.compile(
    r"(?:[\x21\x23-\x24\x26-\x2b\x2d-\x3a\x3c-\x5b\x5d-\x7e]|%[0-9A-Fa-f]{2})*"
)
_OURS: Final = frozenset({CRITICALITY_KEY, TENANT_KEY})
_OUR_KEY: Final = rf"[ \t+]*(?:{'|'.join(map(re.escape, sorted(_OURS)))})[ \t+]*(?=[=;,]|\Z)"
_OUR_MEMBER: Final = re.compile(rf",{_OUR_KEY}[^,]*")
# Some libraries decode keys, strip all Unicode whitespace, and forward the plain keys. So a key
# with an escape, or with a character that no key may contain, could become ours downstream.
_ODD_KEY: Final = r"[!#$&'*+\-.^_`|~0-9A-Za-z \t]*[^!#$&'*+\-.^_`|~0-9A-Za-z \t=;,]"
_STRANGERS_MEMBER: Final = re.compile(rf",(?:{_OUR_KEY}|{_ODD_KEY})[^,]*")
_LEVELS: Final = {level.name.lower().replace("_", "-"): level for level in Criticality}
_WORDS: Final = {level: word for word, level in _LEVELS.items()}


def read_baggage(value: str | bytes) -> dict[str, str]:
    """Return the members of a baggage header by key, with decoded values and without properties.

    Members after the 64th are ignored, and so are malformed ones. A key that is given twice with
    different values is left out, as it is ambiguous.
    """
    text = text_of(value)
    if not text:
        return {}
    members: dict[str, str | None] = {}
    for member in text.split(",", _MOST_MEMBERS)[:_MOST_MEMBERS]:
        key, equals, rest = member.partition("=")
        key = key.strip(" \t")
        raw = rest.partition(";")[0].strip(" \t")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(raw):
            continue
        if key in _OURS:
            # OpenTelemetry forwards a blank as a plus, and a plus as an escape, as HTML forms do.
            raw = raw.replace("+", " ")
        try:
            decoded = unquote(raw, errors="strict") if "%" in raw else raw
        except UnicodeDecodeError:
            continue
        members[key] = decoded if members.get(key, decoded) == decoded else None
    return {key: member for key, member in members.items() if member is not None}


def read_criticality(baggage: Mapping[str, str]) -> Criticality | None:
    """Return the criticality in the baggage, or None."""
    return _LEVELS.get(baggage.get(CRITICALITY_KEY, ""))


def read_tenant(baggage: Mapping[str, str]) -> str | None:
    """Return the tenant in the baggage, 1 to 255 printable characters, or None."""
    tenant = baggage.get(TENANT_KEY)
    return tenant if tenant is not None and _is_tenant(tenant) else None


def baggage_without_ours(existing: str) -> str:
    """Return an untrusted baggage without our members, and without any that could become one.

    Those are all members whose key contains escapes or is invalid: other libraries decode it.
    """
    return _STRANGERS_MEMBER.sub("", f",{existing}")[1:]


def write_baggage(existing: str | None, criticality: Criticality | None, tenant: str | None) -> str:
    """Return the baggage to send: `existing`, with our two members set, or removed where None.

    The members of others take precedence: if ours do not fit into 8 KiB beside them, ours are left
    out. A longer `existing`, which no receiver has to read, stays unchanged. A tenant that no
    receiver would accept is not sent. "" means: send no header.
    """
    existing = existing or ""
    if len(existing) > LONGEST:
        return existing
    others = _OUR_MEMBER.sub("", f",{existing}")[1:]
    ours = []
    if criticality is not None:
        ours.append(f"{CRITICALITY_KEY}={_WORDS[criticality]}")
    if tenant is not None and _is_tenant(tenant):
        ours.append(f"{TENANT_KEY}={quote(tenant, safe='')}")
    # First, since a receiver may read no more than 64 members.
    joined = ",".join([*ours, others] if others.strip(" \t") else ours)
    return joined if len(joined) <= LONGEST else others


def _is_tenant(name: str) -> bool:
    return 0 < len(name) <= _LONGEST_TENANT and name.isprintable()
