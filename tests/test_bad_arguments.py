"""Whatever is wrong in an argument is told where it was given, with what to write instead."""

from __future__ import annotations

import re
from math import inf, nan
from random import Random

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    Criticality,
    Deadline,
    Fallback,
    Guard,
    InFlightRatio,
    RequestRatio,
    Retry,
    RetryBudget,
    SuccessDeposit,
    SystemClock,
    ThreadBulkhead,
    Timeout,
    VirtualClock,
    adaptive,
    adaptive_attempts,
    check_threads,
    constant,
    criticality,
    deadline,
    decorrelated_jitter,
    exponential,
    full_jitter,
    get_guard,
    growing,
    guard_from_table,
    guards_from_toml,
    idempotency_key,
    linear,
    n_of_m,
    plus_minus,
    pool_size,
    ramp,
    static,
    subscribe,
    timeout_for,
)
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    retries,
    run_virtual,
    slow,
    virtual_time,
)

HUGE = 10**400


def _retry(**settings):
    return Retry(**{"on": OSError, **settings})


def _standard(**settings):
    return Guard.standard("bad", **{"on": OSError, "timeout": 2.0, **settings})


def _guard(*policies, **settings):
    return Guard("bad", *(policies or (Timeout(2.0),)), **settings)


def _deadline():
    return Deadline(10.0, VirtualClock())


def _table(**table):
    return guard_from_table("bad", table)


_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (None, TypeError)]
_SECONDS += [(True, TypeError), (HUGE, ValueError), ([1], TypeError)]
_POSITIVE = [*_SECONDS, (0, ValueError), (inf, ValueError)]
_FINITE = [*_SECONDS, (inf, ValueError)]
_PAUSES = [case for case in _FINITE if case[0] != [1]]  # a list of delays is a backoff
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), (nan, TypeError), ("3", TypeError)]
_COUNTS += [(True, TypeError), (None, TypeError)]
_NATURALS = [case for case in _COUNTS if case[0] != 0]
_RATIOS = [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("0.5", TypeError)]
_RATIOS += [(True, TypeError), (inf, ValueError)]
_SHARES = [*_RATIOS, (0, ValueError)]
_FACTORS = [(0.5, ValueError), (nan, ValueError), (inf, ValueError), ("2", TypeError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError), (0, TypeError), ("", TypeError), (False, TypeError)]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (["enforce"], ValueError)]


def _optional(cases):
    """Leave None out, which means: as by default."""
    return [case for case in cases if case[0] is not None]


# What is called, which argument is bad, the bad values, and a word of the advice.
TABLE = [
    # --- policies ---
    ("Timeout", Timeout, _POSITIVE, r"seconds"),
    ("Timeout sync", lambda x: Timeout(1, sync=x), _CHOICES, "'cooperative', 'thread'"),
    ("Timeout threads", lambda x: Timeout(1, sync="thread", max_threads=x), _COUNTS, "write"),
    ("Timeout threads unused", lambda x: Timeout(1, max_threads=x), _COUNTS, "write"),
    ("Timeout update", lambda x: Timeout(1).update(seconds=x), _POSITIVE, "seconds"),
    ("Retry attempts", lambda x: _retry(attempts=x), _COUNTS, "write .*number|1 or more"),
    ("Retry backoff", lambda x: _retry(backoff=x), [*_PAUSES, ("", TypeError)], "seconds"),
    ("Retry delays", lambda x: _retry(backoff=[0.1, x]), _FINITE, "seconds"),
    ("Retry no delays", lambda x: _retry(backoff=x), [([], ValueError)], "at least one delay"),
    (
        "Retry on",
        lambda x: Retry(on=x),
        [
            ("OSError", TypeError),
            ((), ValueError),
            ([], ValueError),
            (None, TypeError),
            (5, TypeError),
            (True, TypeError),
            (BaseException, TypeError),
            ((OSError, "x"), TypeError),
            ((OSError, KeyboardInterrupt), TypeError),
            ((OSError, 5), TypeError),
            (int, TypeError),
            (OSError(), TypeError),
        ],
        r"exception types, such as on=ConnectionError",
    ),
    ("Retry on missing", lambda _: Retry(), [(None, TypeError)], "on"),
    (
        "Retry budget",
        lambda x: _retry(budget=x),
        [(True, TypeError), (0.2, TypeError), (SuccessDeposit(), TypeError), (0, TypeError)],
        r"budget=RetryBudget\(",
    ),
    ("Retry reader", lambda x: _retry(retry_after=x), _FUNCTIONS, "function"),
    ("Retry longest", lambda x: _retry(max_retry_after=x), _FINITE, "seconds"),
    ("Retry update", lambda x: _retry().update(attempts=x), _COUNTS, "write"),
    ("Retry update pause", lambda x: _retry().update(backoff=x), _PAUSES, "seconds"),
    ("adaptive_attempts", adaptive_attempts, [*_COUNTS, (1, ValueError)], "write"),
    ("RetryBudget", RetryBudget, [(0.2, TypeError), (True, TypeError)], r"SuccessDeposit\(\)"),
    ("SuccessDeposit", SuccessDeposit, [(2, ValueError), (nan, ValueError), ("9", TypeError)], "3"),
    ("SuccessDeposit ratio", lambda x: SuccessDeposit(10, x), _SHARES, "share"),
    ("RequestRatio", RequestRatio, _RATIOS, "share"),
    ("RequestRatio window", lambda x: RequestRatio(window=x), _POSITIVE, "seconds"),
    ("RequestRatio floor", lambda x: RequestRatio(floor=x), _FINITE, "number"),
    ("InFlightRatio", InFlightRatio, _RATIOS, "share"),
    ("InFlightRatio floor", lambda x: InFlightRatio(floor=x), _NATURALS, "write"),
    ("Bulkhead", Bulkhead, _COUNTS, "write"),
    ("Bulkhead wait", lambda x: Bulkhead(1, max_wait=x), _SECONDS, "seconds"),
    ("Bulkhead room", lambda x: Bulkhead(1, max_waiting=x), _optional(_COUNTS), "write"),
    ("Bulkhead order", lambda x: Bulkhead(1, order=x), _CHOICES, "'fifo', 'lifo', 'criticality'"),
    ("Bulkhead mode", lambda x: Bulkhead(1, mode=x), _CHOICES, "'enforce', 'shadow', 'off'"),
    ("Bulkhead update", lambda x: Bulkhead(1).update(limit=x), _COUNTS, "write"),
    ("Bulkhead update mode", lambda x: Bulkhead(1).update(mode=x), _CHOICES, "'shadow'"),
    ("Bulkhead update wait", lambda x: Bulkhead(1).update(max_wait=x), _SECONDS, "seconds"),
    ("ThreadBulkhead", ThreadBulkhead, _COUNTS, "write"),
    (
        "ThreadBulkhead queue",
        lambda x: ThreadBulkhead(1, max_queue=x),
        _optional(_NATURALS),
        "write",
    ),
    ("Cache", Cache, _POSITIVE, "seconds"),
    ("Cache stale", lambda x: Cache(1, stale_if_error=x), _FINITE, "seconds"),
    ("Cache entries", lambda x: Cache(1, max_entries=x), _COUNTS, "write"),
    ("Cache key", lambda x: Cache(1, key=x), _FUNCTIONS, "function"),
    ("Cache update", lambda x: Cache(1).update(ttl=x), _POSITIVE, "seconds"),
    ("Cache update size", lambda x: Cache(1).update(max_entries=x), _COUNTS, "write"),
    ("Fallback empty", lambda _: Fallback(), [(None, ValueError)], r"static\('try later'\)"),
    (
        "Fallback",
        Fallback,
        [(5, TypeError), ("x", TypeError), (None, TypeError)],
        r"write static\(",
    ),
    (
        "Fallback on",
        lambda x: Fallback(static(1), on=x),
        [
            (5, TypeError),
            (None, TypeError),
            ("OSError", TypeError),
            ((), TypeError),
            (int, TypeError),
            (KeyboardInterrupt, TypeError),
            ((OSError, 5), TypeError),
        ],
        "exception types, such as on=ConnectionError",
    ),
    ("Breaker ratio", lambda x: Breaker(failure_ratio=x), _SHARES, "share"),
    ("Breaker window", lambda x: Breaker(window=x), _optional(_POSITIVE), "seconds"),
    ("Breaker calls", lambda x: Breaker(window_calls=x), _optional(_COUNTS), "write"),
    ("Breaker least", lambda x: Breaker(min_calls=x), _optional(_COUNTS), "write"),
    ("Breaker consecutive", lambda x: Breaker(consecutive=x), _optional(_COUNTS), "write"),
    (
        "Breaker slow",
        lambda x: Breaker(slow_after=x, slow_ratio=1),
        _optional(_POSITIVE),
        "seconds",
    ),
    ("Breaker slow ratio", lambda x: Breaker(slow_after=1, slow_ratio=x), _SHARES, "share"),
    ("Breaker slow alone", lambda x: Breaker(slow_after=x), [(1.0, ValueError)], "slow_ratio"),
    ("Breaker break", lambda x: Breaker(break_for=x), _POSITIVE, "seconds"),
    ("Breaker break made", lambda x: Breaker(break_for=lambda _: x), _POSITIVE, "seconds"),
    ("Breaker probes", lambda x: Breaker(probes=x), [(3, TypeError), ("x", TypeError)], "single()"),
    ("Breaker probe time", lambda x: Breaker(probe_timeout=x), _POSITIVE, "seconds"),
    ("Breaker classifier", lambda x: Breaker(is_failure=x), _FUNCTIONS, "function"),
    ("Breaker key", lambda x: Breaker(key=x), _FUNCTIONS, "function"),
    ("Breaker keys", lambda x: Breaker(max_keys=x), _COUNTS, "write"),
    ("Breaker mode", lambda x: Breaker(mode=x), _CHOICES, "'enforce', 'shadow', 'off'"),
    ("Breaker update", lambda x: Breaker().update(failure_ratio=x), _SHARES, "share"),
    ("Breaker isolate", lambda x: Breaker().isolate(x), [("key", TypeError)], "keyed"),
    (
        "Breaker isolate keyed",
        lambda _: Breaker(key=len).isolate(),
        [(None, TypeError)],
        "give the key",
    ),
    # --- settings that do not exist ---
    ("update nothing", lambda x: x.update(), [(Timeout(1), TypeError)], "name what to change"),
    (
        "update unknown",
        lambda x: x.update(nonsense=1),
        [
            (Timeout(1), TypeError),
            (Bulkhead(1), TypeError),
            (Breaker(), TypeError),
            (Cache(1), TypeError),
            (_retry(), TypeError),
        ],
        "it takes",
    ),
    (
        "update fixed",
        lambda x: x.update(nonsense=1),
        [(Fallback(static(1)), TypeError), (ThreadBulkhead(1), TypeError)],
        "nothing that can be changed",
    ),
    # --- numbers for policies ---
    ("adaptive p", lambda x: adaptive(p=x, floor=1, cap=2), _SHARES, "share"),
    ("adaptive factor", lambda x: adaptive(factor=x, floor=1, cap=2), _FACTORS, "at least 1"),
    ("adaptive floor", lambda x: adaptive(floor=x, cap=2), _POSITIVE, "seconds"),
    ("adaptive cap", lambda x: adaptive(floor=1, cap=x), _POSITIVE, "seconds"),
    ("adaptive order", lambda x: adaptive(floor=2, cap=x), [(1, ValueError)], "a cap of at least"),
    ("constant", constant, _FINITE, "seconds"),
    ("constant jitter", lambda x: constant(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("full_jitter", full_jitter, _FINITE, "seconds"),
    ("full_jitter cap", lambda x: full_jitter(1, x), _FINITE, "seconds"),
    ("full_jitter order", lambda x: full_jitter(2, x), [(1, ValueError)], r"write cap=2.0 or more"),
    ("exponential", exponential, _FINITE, "seconds"),
    ("exponential factor", lambda x: exponential(1, factor=x), _FACTORS, "at least 1"),
    ("exponential jitter", lambda x: exponential(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("linear", linear, _FINITE, "seconds"),
    ("linear step", lambda x: linear(1, step=x), _optional(_FINITE), "seconds"),
    ("linear jitter", lambda x: linear(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("decorrelated_jitter", decorrelated_jitter, _FINITE, "seconds"),
    ("decorrelated cap", lambda x: decorrelated_jitter(1, x), _FINITE, "seconds"),
    ("plus_minus", plus_minus, _SHARES, "share"),
    ("growing", growing, _POSITIVE, "seconds"),
    ("growing factor", lambda x: growing(1, factor=x), _FACTORS, "at least 1"),
    ("growing cap", lambda x: growing(1, cap=x), _POSITIVE, "seconds"),
    ("growing order", lambda x: growing(10, cap=x), [(5, ValueError)], "cap"),
    ("n_of_m n", lambda x: n_of_m(x, 3), _COUNTS, "write"),
    ("n_of_m m", lambda x: n_of_m(1, x), _COUNTS, "write"),
    ("n_of_m order", lambda x: n_of_m(3, x), [(2, ValueError)], "n <= m"),
    ("ramp step", lambda x: ramp(step=x), _POSITIVE, "seconds"),
    ("ramp shares", lambda x: ramp((0.1, x), step=1), _SHARES, "share"),
    (
        "ramp order",
        lambda x: ramp(x, step=1),
        [((), ValueError), ((0.5, 0.1), ValueError), ((0.5, 0.5), ValueError)],
        "growing shares",
    ),
    ("ramp no shares", lambda x: ramp(x, step=1), [(5, TypeError), (0.5, TypeError)], "shares"),
    ("pool_size", lambda x: pool_size(x, 1), _FINITE, "number"),
    ("pool_size time", lambda x: pool_size(1, x), _FINITE, "seconds"),
    ("pool_size headroom", lambda x: pool_size(1, 1, x), _FACTORS, "at least 1"),
    ("timeout_for", timeout_for, _POSITIVE, "seconds"),
    ("timeout_for factor", lambda x: timeout_for(1, x), _FACTORS, "at least 1"),
    ("timeout_for budget", lambda x: timeout_for(1, 2, x), _optional(_POSITIVE), "seconds"),
    # --- guards ---
    ("Guard name", lambda x: Guard(x, Timeout(1)), [("", TypeError), (5, TypeError)], "a name"),
    ("Guard no name", lambda _: Guard(Timeout(1)), [(None, TypeError)], "such as 'vendor'"),
    ("Guard empty", lambda _: Guard("bad"), [(None, ValueError)], "at least one policy"),
    ("Guard class", _guard, [(Timeout, TypeError)], r"write Timeout\(\.\.\.\)"),
    ("Guard value", _guard, [(5, TypeError), ([Timeout(1)], TypeError)], "no policy"),
    ("Guard twice", lambda x: _guard(x, x), [(Timeout(1), ValueError)], "make a second one"),
    (
        "Guard idempotent",
        lambda x: _guard(idempotent=x),
        [("no", TypeError), (None, TypeError)],
        "True or False",
    ),
    ("Guard clock", lambda x: _guard(clock=x), [(5, TypeError), (SystemClock, TypeError)], "clock"),
    ("Guard rng", lambda x: _guard(rng=x), [(5, TypeError), (Random, TypeError)], "Random"),
    (
        "Guard mark",
        lambda x: _guard()(idempotent=x),
        [("no", TypeError)],
        "True or False",
    ),
    ("Guard call", lambda x: _guard(Bulkhead(1)).call(x), [(5, TypeError)], "function|callable"),
    ("standard on", lambda _: Guard.standard("bad", timeout=1), [(None, TypeError)], "on"),
    ("standard timeout", lambda x: _standard(timeout=x), _POSITIVE, "seconds"),
    ("standard attempts", lambda x: _standard(attempts=x), _COUNTS, "write"),
    ("standard backoff", lambda x: _standard(backoff=x), _PAUSES, "seconds"),
    ("standard total", lambda x: _standard(total_timeout=x), _optional(_POSITIVE), "seconds"),
    (
        "standard total unused",
        lambda x: _standard(total_timeout=x, attempts=1),
        _optional(_POSITIVE),
        "seconds",
    ),
    ("standard limit", lambda x: _standard(limit=x), _optional(_COUNTS), "write"),
    ("standard wait", lambda x: _standard(limit=1, max_wait=x), _SECONDS, "seconds"),
    ("standard wait unused", lambda x: _standard(max_wait=x), _SECONDS, "seconds"),
    ("standard wait no limit", lambda x: _standard(max_wait=x), [(1.0, ValueError)], "limit"),
    (
        "standard fallback",
        lambda x: _standard(fallback=x),
        [(5, TypeError), ("later", TypeError), ([5], TypeError), ([], ValueError)],
        "static",
    ),
    ("standard sync", lambda x: _standard(sync=x), _CHOICES, "'cooperative', 'thread'"),
    ("get_guard", get_guard, [("nobody", KeyError), (5, KeyError)], "there are"),
    ("check_threads", check_threads, _COUNTS, "write"),
    ("subscribe", subscribe, [(5, TypeError), (None, TypeError)], "takes one event"),
    ("subscribe types", lambda x: subscribe(print, x), [(5, TypeError), (int, TypeError)], "event"),
    # --- context ---
    ("deadline", deadline, _FINITE, "seconds"),
    ("deadline clock", lambda x: deadline(1.0, clock=x), [(5, TypeError)], "clock"),
    (
        "Deadline",
        lambda x: Deadline(x, VirtualClock()),
        [("soon", TypeError), (nan, ValueError), (None, TypeError)],
        "instant",
    ),
    ("shrink", lambda x: _deadline().shrink(x), _FINITE, "seconds"),
    ("split", lambda x: _deadline().split(x), [(0, ValueError), (-1, ValueError)], "1 or more"),
    ("split type", lambda x: _deadline().split(x), [(1.5, TypeError), (None, TypeError)], "split"),
    ("split weights", lambda x: _deadline().split([1, x]), _FINITE, "number"),
    (
        "split nothing",
        lambda x: _deadline().split(x),
        [([], ValueError), ([0], ValueError)],
        r"\[1,",
    ),
    ("criticality", criticality, [(2, TypeError), ("CRITICAL", TypeError)], "Criticality.CRITICAL"),
    ("idempotency_key", idempotency_key, [("", ValueError), (5, ValueError)], "non-empty string"),
    ("VirtualClock", VirtualClock, _FINITE, "number"),
    ("VirtualClock sleep", lambda x: VirtualClock().sleep(x), _FINITE, "seconds"),
    ("VirtualClock back", lambda x: VirtualClock(5).advance_to(x), [(1, ValueError)], "later"),
    # --- settings from tables ---
    ("table", lambda x: guard_from_table("bad", x), [(5, TypeError), ([], TypeError)], "a table"),
    ("table empty", lambda _: _table(), [(None, ValueError)], "'standard' or"),
    ("table both", lambda _: _table(standard={}, policies=[]), [(None, ValueError)], "either"),
    ("table unknown", lambda _: _table(nonsense=1), [(None, ValueError)], "there are policies"),
    ("table standard", lambda x: _table(standard=x), [(5, TypeError), ("x", TypeError)], "table"),
    (
        "table policies",
        lambda x: _table(policies=x),
        [(5, TypeError), ("x", (TypeError, ValueError))],
        "list|one of",
    ),
    ("table no policies", lambda x: _table(policies=x), [([], ValueError)], "at least one policy"),
    (
        "table policy",
        lambda x: _table(policies=[x]),
        [({}, ValueError), ({"policy": "x"}, ValueError), (5, ValueError)],
        "write one of breaker, bulkhead",
    ),
    (
        "table idempotent",
        lambda x: _table(standard={"on": "OSError", "timeout": 1}, idempotent=x),
        [("no", TypeError)],
        "True or False|true or false",
    ),
    (
        "table on",
        lambda x: _table(standard={"on": x, "timeout": 1}),
        [("Nonsense", ValueError), ("int", ValueError), (["print"], ValueError)],
        "names=",
    ),
    (
        "table on type",
        lambda x: _table(standard={"on": x, "timeout": 1}),
        [(5, TypeError), ([5], TypeError), ([["OSError"]], TypeError)],
        "exception",
    ),
    (
        "table fallback",
        lambda x: _table(standard={"on": "OSError", "timeout": 1, "fallback": x}),
        [("later", ValueError), (["later"], ValueError)],
        r"names=\{'later'",
    ),
    ("toml", guards_from_toml, [("", ValueError), ("a = 1", ValueError)], r"\[guards.vendor"),
    ("toml type", guards_from_toml, [(b"", TypeError)], "str|text"),
    # --- helpers for tests ---
    ("retries", lambda x: retries(x).__enter__(), _CHOICES, "'instant', 'off'"),
    ("answer", lambda x: answer(times=x), _optional(_COUNTS), "write"),
    ("hang", lambda x: hang(times=x), _optional(_COUNTS), "write"),
    ("slow", slow, _SECONDS, "seconds"),
    ("fail", fail, [("x", TypeError), (5, TypeError), (KeyboardInterrupt(), TypeError)], "rror"),
    ("ScriptedService", ScriptedService, [(5, TypeError), ("x", TypeError)], "answer"),
    ("ScriptedService empty", lambda _: ScriptedService(), [(None, ValueError)], "answer"),
    ("virtual_time", lambda x: virtual_time(x).__enter__(), [(5, TypeError)], "VirtualClock"),
    ("run_virtual", run_virtual, [(5, (TypeError, ValueError)), (print, ValueError)], "coroutine"),
]

CASES = [
    pytest.param(make, bad, error, advice, id=f"{name}({str(bad)[:20]})")
    for name, make, bads, advice in TABLE
    for bad, error in bads
]


@pytest.mark.parametrize(("make", "bad", "error", "advice"), CASES)
def test_a_bad_argument_is_told_with_advice(make, bad, error, advice):
    """It raises at construction, and the message says what to write instead."""
    with pytest.raises(error) as raised:
        make(bad)
    assert re.search(advice, str(raised.value)), raised.value


def test_bad_changes_change_nothing():
    """update() with one bad value among good ones leaves all settings as they were."""
    bulkhead, cache, retry = Bulkhead(1), Cache(1.0), _retry(attempts=2)
    breaker, timeout = Breaker(failure_ratio=0.5), Timeout(1.0)
    for policy, changes in (
        (bulkhead, {"limit": 5, "max_wait": -1}),
        (cache, {"ttl": 5.0, "max_entries": 0}),
        (retry, {"attempts": 5, "backoff": nan}),
        (breaker, {"failure_ratio": 0.9, "mode": "nonsense"}),
        (breaker, {"mode": "off", "failure_ratio": 9}),
        (timeout, {"seconds": 5.0, "sync": "thread"}),
    ):
        with pytest.raises((TypeError, ValueError)):
            policy.update(**changes)
    assert (bulkhead.limit, cache.ttl, retry.attempts, timeout.seconds) == (1, 1.0, 2, 1.0)
    assert (breaker.settings.failure_ratio, breaker.mode) == (0.5, "enforce")


def test_good_arguments_at_the_edges_are_taken():
    """The least and greatest values that make sense raise nothing."""
    Timeout(1e-9)
    Bulkhead(1, max_wait=inf)
    Retry(on=[OSError, lambda _error, _value: False], attempts=1, backoff=0, max_retry_after=0)
    Breaker(failure_ratio=1, min_calls=1, break_for=growing(1.0))
    Cache(1, stale_if_error=0, max_entries=1)
    ThreadBulkhead(1, max_queue=0)
    SuccessDeposit(3, 1)
    Deadline(5.0, VirtualClock()).split([0, 1])
    with criticality(Criticality.SHEDDABLE), deadline(0):
        pass
