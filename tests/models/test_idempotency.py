"""The rules of keys, payloads and answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models import idempotency as rules
from seawall.models.idempotency import (
    NEVER_STORED,
    Answer,
    Form,
    Garbled,
    Mismatch,
    Pending,
    Record,
    RecordState,
    Replay,
    check_key,
    decide,
    fingerprint_of,
    headers_of,
    headers_text,
    key_digest,
    storable,
)
from tests.support import falsified

TEXTS = st.text(min_size=1, max_size=5)
TRIPLES = st.tuples(TEXTS, TEXTS, st.text("ab", min_size=1, max_size=3))
HEADERS = st.lists(
    st.tuples(
        st.binary(max_size=6).filter(lambda b: not set(b) & set(b"\r\n\0")),
        st.binary(max_size=6).filter(lambda b: not set(b) & set(b"\r\n\0")),
    )
)
JUNK = st.one_of(
    st.none(), st.integers(), st.text(max_size=9), st.binary(max_size=9), st.floats(), st.booleans()
)


def distinct(pair: tuple[tuple[str, str, str], tuple[str, str, str]]) -> None:
    """Different names have different hashes."""
    one, other = pair
    assert (one == other) == (key_digest(*one) == key_digest(*other))


@given(st.tuples(TRIPLES, TRIPLES))
def test_records_of_different_names_never_meet(pair: tuple[tuple[str, str, str], ...]):
    """Scope, operation and key are told apart, wherever one ends and the next begins."""
    distinct(pair)  # type: ignore[arg-type]
    scope, operation, key = pair[0]
    assert key_digest(scope + operation, "x", key) != key_digest(scope, operation + "x", key)


def test_without_lengths_they_would_meet(monkeypatch: pytest.MonkeyPatch):
    """Ablation: joined without their lengths, ("a", "bc") is ("ab", "c")."""
    monkeypatch.setattr(rules, "_sized", lambda part: part)
    monkeypatch.setattr(rules, "_begun", rules._begun.__wrapped__)
    letters = st.text("a", min_size=1, max_size=3)
    triples = st.tuples(letters, letters, letters)
    assert falsified(distinct, st.tuples(triples, triples))


def test_keys_and_payloads_have_hashes_of_their_own():
    """A key's hash is not that of a payload with the same bytes, and does not hold the key."""
    assert key_digest("a", "b", "c") != fingerprint_of("a", "b", "c")
    assert fingerprint_of("ab", "") != fingerprint_of("a", "b")
    assert fingerprint_of("a") == fingerprint_of(b"a") == fingerprint_of(bytearray(b"a"))
    assert len(key_digest("a", "b", "c")) == 32


@given(st.text(max_size=300))
def test_keys_are_visible_ascii(key: str):
    """From 1 to 255 characters, and nothing else."""
    fine = 1 <= len(key) <= 255 and all("!" <= letter <= "~" for letter in key)
    if fine:
        assert check_key(key) == key
    else:
        with pytest.raises(ValueError, match="visible ASCII"):
            check_key(key)


@given(HEADERS)
def test_headers_come_back_as_they_were(headers: list[tuple[bytes, bytes]]):
    """Byte for byte, whatever bytes they are."""
    assert headers_of(headers_text(headers)) == headers


@given(HEADERS, st.sampled_from(sorted(NEVER_STORED)), st.binary(max_size=4))
def test_what_is_of_a_login_or_a_connection_is_not_kept(
    headers: list[tuple[bytes, bytes]], name: bytes, value: bytes
):
    """In whatever case it is written; also what Connection names."""
    secret = [(name.title(), value), (b"Connection", b"close, X-Hop"), (b"x-hop", b"1")]
    kept = storable([*headers, *secret])
    assert not {name.lower() for name, _ in kept} & (NEVER_STORED | {b"x-hop"})
    assert storable(kept) == kept


def record(**changed: object) -> Record:
    """Return a record that is complete, with changes."""
    usual = Record(1, b"f", 3, 201, "[]", b"x", 1, 0, 100, 50)
    return usual._replace(**changed)


def test_what_who_asks_gets():
    """Free, another's, at work, done."""
    assert decide(None, b"f") == "free"
    assert decide(record(expires_at=50), b"other") == "free"
    assert decide(record(), b"g") == Mismatch()
    assert decide(record(), b"") == decide(record(), b"f")
    assert decide(record(), b"f") == Replay(Answer(201, [], b"x"))
    assert decide(record(state=2), b"f") == Replay(Answer(201, [], b"x"), failed=True)
    pending = {"state": RecordState.PENDING, "form": None}
    assert decide(record(**pending, lease_until=50), b"f") == "free"
    assert decide(record(**pending, lease_until=51), b"f") == Pending(0.1)
    assert decide(record(**pending, lease_until=50 + 2_500_000), b"f") == Pending(2.5)
    assert decide(record(**pending, lease_until=50), b"g") == Mismatch()


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Record._fields, JUNK)))
def test_a_record_is_understood_or_refused(junk: dict[str, object]):
    """Nothing in a table makes the rules fail in another way."""
    try:
        found = decide(record(**junk), b"f")
    except Garbled:
        return
    assert found == "free" or isinstance(found, (Replay, Pending, Mismatch))
    if isinstance(found, Replay):
        try:
            assert found.value is None or found.form is not Form.NOTHING
        except Garbled:
            assert found.form is Form.JSON


def test_deep_json_is_refused():
    """A value of a hundred thousand brackets is no value."""
    with pytest.raises(Garbled):
        rules.json_of("[" * 100_000)
