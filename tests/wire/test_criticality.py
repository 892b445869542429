from __future__ import annotations

from urllib.parse import quote_plus, unquote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Criticality
from seawall.wire import criticality
from seawall.wire.criticality import (
    baggage_without_ours,
    read_baggage,
    read_criticality,
    read_tenant,
    write_baggage,
)
from tests.support import falsified

LEVELS = st.none() | st.sampled_from(Criticality)
TENANTS = st.none() | st.text(max_size=260)
OTHERS = st.lists(
    st.sampled_from(
        [
            "a=1",
            " b = 2 ;p;q=3",
            "c=%2C",
            "seawall.tenant2=x",
            "Seawall.tenant=x",
            "bad",
            "",
            "d=\t4 ",
        ]
    ),
    max_size=5,
)
SMUGGLED = st.sampled_from(
    [
        "seawall.criticality=critical-plus",
        " seawall.tenant = mallory;p=1",
        "+seawall.tenant+=mallory",
        "seawall.tenant",
    ]
)
ENCODED = st.sampled_from(
    [
        "seawall%2Etenant=mallory",
        "%73eawall.criticality=critical-plus",
        "%E3%80%80seawall.tenant%0a=mallory",
        "\xc2\xa0seawall.tenant=mallory",
        "\x1cseawall.tenant=mallory",
        "seawall%2etenan%74;p=1",
        "seawall%252Etenant=mallory",
        "x%3D1%2Cseawall.tenant=mallory",
        "seawall.tenant%3Dmallory%3B=1",
    ]
)


@pytest.mark.parametrize(
    ("word", "level"),
    [
        ("sheddable", Criticality.SHEDDABLE),
        ("sheddable-plus", Criticality.SHEDDABLE_PLUS),
        ("critical", Criticality.CRITICAL),
        ("critical-plus", Criticality.CRITICAL_PLUS),
        ("CRITICAL", None),
        ("3", None),
        ("", None),
    ],
)
def test_four_words(word: str, level: Criticality | None):
    """The four levels have a word each, and there is no other."""
    assert read_criticality(read_baggage(f"seawall.criticality={word}")) is level


def test_baggage_is_read_as_the_standard_says():
    """Members by key, blanks and properties left out, values decoded."""
    text = b"userId=alice , serverNode=DF%2028;p=1;q, isProduction=false,broken,=x,k y=1,e="
    assert read_baggage(text) == {
        "userId": "alice",
        "serverNode": "DF 28",
        "isProduction": "false",
        "e": "",
    }


def test_a_contradiction_is_left_out():
    """A key with two values says nothing; with the same value twice it does."""
    assert read_baggage("a=1,a=2,b=1,b=1") == {"b": "1"}
    assert read_baggage("a=1,a=2,a=1") == {}


def test_at_most_64_members():
    """Of more members the rest is ignored."""
    assert len(read_baggage(",".join(f"k{n}=1" for n in range(100)))) == 64


@pytest.mark.parametrize("tenant", ["%0A", "%00x", "", "%E2%80%AE", "x" * 256, "%FF", "%ED%A0%80"])
def test_a_tenant_is_short_and_printable(tenant: str):
    """Control characters, nothing, and too much are no tenant: it will be logged and be a key."""
    assert read_tenant(read_baggage(f"seawall.tenant={tenant}")) is None


@given(LEVELS, TENANTS, OTHERS)
def test_what_is_written_is_read(level: Criticality | None, tenant: str | None, others: list[str]):
    """The next service reads the level and the tenant, if it is one, and all else as before."""
    existing = ",".join(others)
    read = read_baggage(write_baggage(existing, level, tenant))
    sayable = tenant is not None and 0 < len(tenant) <= 255 and tenant.isprintable()
    assert read_criticality(read) is level
    assert read_tenant(read) == (tenant if sayable else None)
    ours = {"seawall.criticality", "seawall.tenant"}
    assert {k: v for k, v in read.items() if k not in ours} == read_baggage(existing)


@given(OTHERS, st.lists(SMUGGLED, max_size=2))
def test_only_our_members_are_changed(others: list[str], smuggled: list[str]):
    """Old members of ours are replaced; what others wrote stays to the letter, escapes and all."""
    others = [*others, "%61=1"]
    mixed = ",".join([*smuggled, *others, *smuggled])
    assert write_baggage(mixed, None, None) == ",".join(others)


def library(header: str) -> str:
    """Pass baggage on as some libraries do: keys are decoded, stripped, and written plainly."""
    pairs = {}
    for member in header.encode("latin-1").decode("utf-8", "replace").split(","):
        key, equals, value = member.partition("=")
        if equals:
            pairs[unquote_plus(key.strip()).strip()] = unquote_plus(value).strip()
    return ",".join(f"{key}={quote_plus(value)}" for key, value in pairs.items())


def nothing_is_smuggled(case: tuple[list[str], list[str]]) -> None:
    """Take a stranger's baggage at the first edge, and pass it on through such libraries."""
    others, smuggled = case
    kept = baggage_without_ours(",".join([*smuggled, *others, *smuggled]))
    assert kept == ",".join(others)
    for _ in range(4):
        kept = library(kept)
        read = read_baggage(kept)
        assert (read_criticality(read), read_tenant(read)) == (None, None)


STRANGERS = st.tuples(OTHERS, st.lists(SMUGGLED | ENCODED, max_size=2))


@given(STRANGERS)
def test_a_strangers_members_never_become_ours(case: tuple[list[str], list[str]]):
    """However it writes a key, and however often it is decoded on the way."""
    nothing_is_smuggled(case)


def test_keys_in_escapes_have_to_go(monkeypatch: pytest.MonkeyPatch):
    """With ours alone removed, a member with an encoded key would pass, and become one of ours."""
    monkeypatch.setattr(criticality, "_STRANGERS_MEMBER", criticality._OUR_MEMBER)
    assert falsified(nothing_is_smuggled, STRANGERS)


@given(st.text(st.characters(exclude_categories=["Z", "C"]) | st.just(" "), min_size=1))
def test_a_tenant_passes_through_libraries(tenant: str):
    """A library that reads and writes blanks as a plus hands the same tenant on."""
    tenant = f"{tenant[:250].strip()}."
    sent = write_baggage(None, Criticality.SHEDDABLE_PLUS, tenant)
    read = read_baggage(library(sent))
    assert (read_criticality(read), read_tenant(read)) == (Criticality.SHEDDABLE_PLUS, tenant)


def test_a_plus_is_a_plus_in_the_members_of_others():
    """Baggage itself has no such rule."""
    assert read_baggage("a=1+1,seawall.tenant=acme+corp%2B") == {
        "a": "1+1",
        "seawall.tenant": "acme corp+",
    }


def test_others_members_have_precedence():
    """Where ours do not fit into 8 KiB beside the others', they are left out."""
    full = "k=" + "v" * 8180
    assert write_baggage(full, Criticality.SHEDDABLE, "acme") == full


def test_nothing_to_say():
    """Nothing there and nothing to add is no header."""
    assert write_baggage(None, None, None) == write_baggage(" ", None, "") == ""
