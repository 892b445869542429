from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Criticality
from seawall.wire import criticality
from seawall.wire.criticality import read_baggage, read_criticality, read_tenant, write_baggage
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
        "seawall%2Etenant=mallory",
        "%73eawall.criticality=critical-plus",
        "+seawall.tenant=mallory",
        "%E3%80%80seawall.tenant%0a=mallory",
        "seawall%2etenan%74;p=1",
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


def nothing_is_smuggled(case: tuple[list[str], list[str]]) -> None:
    """Write over what a stranger put under our keys; what others wrote stays to the letter."""
    others, smuggled = case
    mixed = ",".join([*smuggled, *others, *smuggled])
    written = write_baggage(mixed, None, None)
    assert not any(member in written.split(",") for member in smuggled)
    assert written == (",".join(others) if ",".join(others).strip() else "")


@given(st.tuples(OTHERS, st.lists(SMUGGLED, max_size=2)))
def test_only_our_members_are_changed(case: tuple[list[str], list[str]]):
    """Old members of ours are replaced, also those that hide; others stay to the letter."""
    nothing_is_smuggled(case)


def test_keys_are_decoded_before_they_are_compared(monkeypatch: pytest.MonkeyPatch):
    """Without that, a member with an encoded key would pass, and be decoded further on."""
    cases = st.tuples(OTHERS, st.lists(SMUGGLED, max_size=2))
    plainly = re.compile(r",[ \t]*seawall\.(?:criticality|tenant)[ \t]*=[^,]*")
    monkeypatch.setattr(criticality, "_OUR_MEMBER", plainly)
    assert falsified(nothing_is_smuggled, cases)


def test_others_members_have_precedence():
    """Where ours do not fit into 8 KiB beside the others', they are left out."""
    full = "k=" + "v" * 8180
    assert write_baggage(full, Criticality.SHEDDABLE, "acme") == full


def test_nothing_to_say():
    """Nothing there and nothing to add is no header."""
    assert write_baggage(None, None, None) == write_baggage(" ", None, "") == ""
