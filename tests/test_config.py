from __future__ import annotations

import gc
import tomllib

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    CircuitOpen,
    Fallback,
    Guard,
    Hedge,
    Policy,
    RateLimit,
    Retry,
    ThreadBulkhead,
    Throttle,
    Timeout,
    guards,
    guards_from_toml,
    static,
)
from seawall.config import guard_from_table, guards_to_toml, update_from_toml
from seawall.config.writing import argument_of
from seawall.policies.hedge import quantile
from seawall.policies.timeout import adaptive_timeout
from seawall.resources import Pool
from seawall.testing import ScriptedService, fail

EVERYTHING = """
    [guards.vendor]
    idempotent = false

    [[guards.vendor.policies]]
    policy = "fallback"
    levels = ["cached", { static = "try later" }]
    on = ["OSError", "TimedOut", "VendorError"]

    [[guards.vendor.policies]]
    policy = "cache"
    ttl = 60.0
    stale_if_error = 600.0
    key = "by_user"
    max_entries = 10

    [[guards.vendor.policies]]
    policy = "timeout"
    seconds = 10
    sync = "cooperative"

    [[guards.vendor.policies]]
    policy = "retry"
    on = "ConnectionError"
    attempts = { kind = "adaptive", maximum = 4 }
    backoff = { kind = "exponential", base = 0.1, cap = 2.0, jitter = "equal" }
    budget = { kind = "request_ratio", ratio = 0.1 }
    retry_after = "asked"

    [[guards.vendor.policies]]
    policy = "breaker"
    consecutive = 5
    break_for = { kind = "growing", base = 5.0 }
    probes = { kind = "n_of_m", n = 2, m = 3 }
    is_failure = "is_bad"
    mode = "shadow"

    [[guards.vendor.policies]]
    policy = "bulkhead"
    limit = 20
    max_wait = 0.5
    order = "lifo"

    [[guards.vendor.policies]]
    policy = "thread_bulkhead"
    workers = 3
    max_queue = 0

    [[guards.vendor.policies]]
    policy = "timeout"
    seconds = { kind = "adaptive", floor = 0.1, cap = 2.0 }
    sync = "thread"
"""


class VendorError(Exception):
    """An error of the vendor's own."""


NAMES = {
    "VendorError": VendorError,
    "asked": lambda _error: None,
    "by_user": lambda user: user,
    "cached": lambda _user: "cached",
    "is_bad": lambda error, _value: error is not None,
}


def _names():
    gc.collect()  # guards of other tests, dead but not collected
    return {guard.name for guard in guards()}


def test_every_kind_of_policy_can_be_written_down():
    """A table for each policy makes the same as its constructor does."""
    vendor = guards_from_toml(EVERYTHING, names=NAMES)["vendor"]
    kinds = (Fallback, Cache, Timeout, Retry, Breaker, Bulkhead, ThreadBulkhead, Timeout)
    assert tuple(map(type, vendor.policies)) == kinds
    fallback, cache, total, retry, breaker, bulkhead, threads, attempt = vendor.policies
    assert not vendor.idempotent
    assert fallback.on[0] is OSError
    assert fallback.on[2] is VendorError
    assert (cache.ttl, cache.stale_if_error, cache.max_entries) == (60.0, 600.0, 10)
    assert (total.seconds, total.sync) == (10.0, "cooperative")
    assert repr(retry.attempts) == "adaptive_attempts(4)"
    assert "jitter='equal'" in repr(retry.backoff)
    assert repr(retry.budget).startswith("RetryBudget(RequestRatio(ratio=0.1")
    assert breaker.settings.consecutive == 5
    assert breaker.settings.break_for(2) == 10.0
    assert breaker.mode == "shadow"
    assert (bulkhead.limit, bulkhead.max_wait) == (20, 0.5)
    assert (threads.pool.size, threads.pool.queue) == (3, 0)
    assert (attempt.longest, attempt.sync) == (2.0, "thread")


@pytest.mark.parametrize(
    ("setting", "made"),
    [
        ('backoff = { kind = "constant", seconds = 1.0 }', "constant(1.0"),
        ('backoff = { kind = "linear", base = 1.0 }', "linear(1.0"),
        ('backoff = { kind = "exponential", base = 1.0 }', "exponential(1.0"),
        ('backoff = { kind = "decorrelated_jitter", base = 1.0 }', "decorrelated_jitter(1.0"),
        ('backoff = { kind = "full_jitter", base = 1.0 }', "exponential(1.0"),
        ("backoff = 0.5", "exponential(0.5"),
        ("backoff = [0.1, 0.2]", "(0.1, 0.2)"),
    ],
)
def test_backoffs_can_be_written_down(setting, made):
    """Seconds, a list, or a table of each public kind of backoff."""
    text = f'[[guards.vendor.policies]]\npolicy = "retry"\non = "OSError"\n{setting}'
    assert made in repr(guards_from_toml(text)["vendor"].policies[0].backoff)


@pytest.mark.parametrize("kind", ["success_deposit", "request_ratio", "in_flight_ratio"])
def test_budgets_can_be_written_down(kind):
    """Each rule of a budget, or `true` for the default one."""
    text = '[[guards.vendor.policies]]\npolicy = "retry"\non = "OSError"\nbudget = '
    made = guards_from_toml(f'{text}{{ kind = "{kind}" }}')["vendor"].policies[0].budget
    assert type(made.rule).__name__.lower() == kind.replace("_", "")
    default = guards_from_toml(f"{text}true".replace("vendor", "other"))["other"]
    assert type(default.policies[0].budget.rule).__name__ == "SuccessDeposit"


@pytest.mark.parametrize(
    "probes",
    [
        '{ kind = "single" }',
        '{ kind = "n_of_m", n = 1, m = 2 }',
        '{ kind = "ramp", step = 5.0 }',
        '{ kind = "slow_start" }',
    ],
)
def test_probes_can_be_written_down(probes):
    """A table of each public kind of probes."""
    text = f'[[guards.vendor.policies]]\npolicy = "breaker"\nprobes = {probes}'
    assert isinstance(guards_from_toml(text)["vendor"].policies[0], Breaker)


def test_the_recommended_stack_from_a_table():
    """`standard` takes the arguments of Guard.standard, fallbacks by name or as values."""
    text = """
        [guards.vendor.standard]
        on = ["ConnectionError"]
        timeout = 2.0
        limit = 5
        sync = "cooperative"
        fallback = ["cached", { static = "later" }]
    """
    vendor = guards_from_toml(text, names={"cached": lambda: {}["missing"]})["vendor"]
    assert repr(vendor) == (
        "<Guard 'vendor': Fallback > Timeout > Retry > Breaker > Bulkhead > Timeout>"
    )
    assert vendor.attempt(ScriptedService(fail(LookupError)).call).value == "later"


def test_seawalls_own_errors_have_names():
    """`on` knows Python's exceptions and Seawall's."""
    table = {"policies": [{"policy": "retry", "on": ["CircuitOpen", "TimeoutError"]}]}
    retry = guard_from_table("vendor", table).policies[0]
    assert retry.is_retryable(CircuitOpen(), None)
    assert retry.is_retryable(TimeoutError(), None)


def test_given_names_win():
    """A name handed over stands before Python's own of that name."""
    table = {"policies": [{"policy": "retry", "on": "OSError"}]}
    retry = guard_from_table("vendor", table, names={"OSError": VendorError}).policies[0]
    assert retry.is_retryable(VendorError(), None)
    assert not retry.is_retryable(OSError(), None)


def test_several_guards_come_by_name():
    """Each table is a guard; all are registered."""
    text = "\n".join(
        f'[guards.config-{name}.standard]\non = "OSError"\ntimeout = 1' for name in "ab"
    )
    made = guards_from_toml(text)
    assert list(made) == ["config-a", "config-b"]
    assert {"config-a", "config-b"} <= _names()


def test_nothing_is_left_when_one_fails():
    """If one table is wrong no guard of the text is registered, and the error names it."""
    text = """
        [guards.config-good.standard]
        on = "OSError"
        timeout = 1
        [guards.config-bad.standard]
        on = "OSError"
        timeout = -1
    """
    with pytest.raises(ValueError, match="seconds=-1") as raised:
        guards_from_toml(text)
    assert raised.value.__notes__ == ["in the settings of guard 'config-bad'"]
    assert not {name for name in _names() if name.startswith("config-")}


def test_nothing_is_left_when_a_name_is_taken():
    """A name that lives already fails the whole text, and the living guard stays."""
    living = Guard("config-b", Timeout(1.0))
    text = "\n".join(
        f'[guards.config-{name}.standard]\non = "OSError"\ntimeout = 1' for name in "ab"
    )
    with pytest.raises(ValueError, match="alive already"):
        guards_from_toml(text)
    assert {name for name in _names() if name.startswith("config-")} == {"config-b"}
    assert living.name == "config-b"


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ({"policy": "timeout"}, TypeError, "needs seconds = ..."),
        ({"policy": "bulkhead"}, TypeError, "needs limit = ..."),
        ({"policy": "cache"}, TypeError, "needs ttl = ..."),
        ({"policy": "thread_bulkhead"}, TypeError, "needs workers = ..."),
        ({"policy": "retry"}, TypeError, "on"),
        ({"policy": "timeout", "seconds": 1, "nonsense": 1}, TypeError, "nonsense"),
        ({"policy": "fallback"}, ValueError, "at least one level"),
        ({"policy": "fallback", "levels": [{"static": 1}], "on": ["No"]}, ValueError, "names="),
        ({"policy": "cache", "ttl": 1, "key": "unknown"}, ValueError, "names={'unknown': ...}"),
        ({"policy": "breaker", "is_failure": 5}, TypeError, "write the name of an exception"),
        (
            {"policy": "retry", "on": "OSError", "backoff": {"kind": "x"}},
            ValueError,
            "backoff: kind='x': write one of constant, decorrelated_jitter",
        ),
        (
            {"policy": "breaker", "probes": {"n": 1}},
            ValueError,
            "probes: kind=None: write one of",
        ),
        (
            {"policy": "retry", "on": "OSError", "backoff": {"kind": "linear"}},
            TypeError,
            "base",
        ),
    ],
)
def test_a_wrong_table_says_what_to_write(policy, error, message):
    """The error tells what is wrong in the file's own words, and in which guard."""
    with pytest.raises(error) as raised:
        guard_from_table("vendor", {"policies": [policy]})
    assert message in str(raised.value)
    assert "in the settings of guard 'vendor'" in raised.value.__notes__
    assert "vendor" not in _names()


def test_a_text_that_is_no_toml_raises():
    """A syntax error is tomllib's own, with its place."""
    with pytest.raises(tomllib.TOMLDecodeError, match="table declaration"):
        guards_from_toml("[guards")


def test_a_table_never_runs_code():
    """A name is looked up among exceptions only: other builtins are refused."""
    for name in ("eval", "__import__", "BaseException", "KeyboardInterrupt", "reason_of"):
        with pytest.raises(ValueError, match="no such exception"):
            guard_from_table("vendor", {"standard": {"on": name, "timeout": 1}})


SCARCE = """
    [[guards.vendor.policies]]
    policy = "shed"
    load = "load"
    rules = [{ kind = "by_criticality", start = 0.7 }, { kind = "by_tier", bars = { free = 0.5 } }]
    [[guards.vendor.policies]]
    policy = "hedge"
    delay = { kind = "quantile", p = 0.95 }
    [[guards.vendor.policies]]
    policy = "throttle"
    k = 1.5
    [[guards.vendor.policies]]
    policy = "rate_limit"
    limits = ["60/s", { rate = "90k/min", cost = "tokens", name = "tokens" }]
    [[guards.vendor.policies]]
    policy = "adaptive_limit"
    limit = { kind = "gradient2", minimum = 5 }
    max_wait = 0.1
    shed = { kind = "codel" }
    [[guards.vendor.policies]]
    policy = "chaos"
    share = 0.5
    error = "OSError"
"""


def test_the_policies_against_scarcity_can_be_written_down():
    """Rules, limits and delays are tables of their kinds; functions are handed over by name."""
    names = {"load": lambda: 0.1, "tokens": len}
    vendor = guards_from_toml(SCARCE, names=names)["vendor"]
    assert repr(vendor) == (
        "<Guard 'vendor': Shed > Hedge > Throttle > RateLimit > AdaptiveLimit > Chaos>"
    )
    limit = vendor.policies[3]
    assert [limit.limits[0].name, limit.limits[1].name] == ["60/s", "tokens"]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ({"policy": "rate_limit"}, TypeError, "give it a rate"),
        ({"policy": "rate_limit", "limits": 5}, TypeError, "write a rate, or a list"),
        ({"policy": "rate_limit", "limits": [{"name": "x"}]}, TypeError, "rate ="),
        ({"policy": "rate_limit", "limits": "60/s", "key": "who"}, ValueError, "names={'who'"),
        ({"policy": "shed", "rules": {"kind": "x"}}, ValueError, "write one of by_chance"),
        ({"policy": "shed", "rules": "by_tier"}, TypeError, "write a rule"),
        ({"policy": "hedge"}, TypeError, "needs delay"),
        ({"policy": "adaptive_limit", "limit": {"kind": "x"}}, ValueError, "write one of aimd"),
        ({"policy": "chaos", "share": 0.1, "error": "No"}, ValueError, "no such exception"),
    ],
)
def test_a_wrong_table_of_a_scarce_thing_says_what_to_write(policy, error, message):
    """The error tells what is wrong in the file's own words."""
    with pytest.raises(error, match=message):
        guard_from_table("vendor", {"policies": [policy]})


# Writing


def by_user(*_arguments: object) -> str:
    return "user"


def asked(_error: Exception) -> float | None:
    return None


def is_bad(error: Exception | None, _value: object) -> bool:
    return error is not None


def cached() -> str:
    return "cached"


FUNCTIONS = {one.__name__: one for one in (by_user, asked, is_bad, cached)} | {
    "VendorError": VendorError,
    "static": static("try later"),
}

OTHERS = """
    [guards.other]
    max_wait = 0.5

    [[guards.other.policies]]
    policy = "retry"
    on = ["ConnectionError", "TimeoutError"]
    attempts = 2
    backoff = [0.1, 0.2]
    budget = { kind = "success_deposit", ratio = 0.2 }

    [[guards.other.policies]]
    policy = "hedge"
    delay = { kind = "quantile", p = 0.9 }
    cap = 0.1
    budget = true

    [[guards.other.policies]]
    policy = "breaker"
    failure_ratio = 0.3
    window = 10.0
    min_calls = 5
    slow_after = 1.0
    slow_ratio = 0.5
    probes = { kind = "slow_start", step = 0.1 }
    is_failure = ["OSError", "VendorError"]

    [[guards.other.policies]]
    policy = "throttle"
    k = 3.0
    probe_every = 5.0

    [[guards.other.policies]]
    policy = "rate_limit"
    limits = ["60/s", { rate = "1000/min", key = "by_user" }]
    burst = 7
    max_wait = inf

    [[guards.other.policies]]
    policy = "adaptive_limit"
    limit = { kind = "aimd", slow_after = 0.5 }
    max_wait = 0.1
    shed = { kind = "codel", target = 0.01 }

    [[guards.other.policies]]
    policy = "timeout"
    seconds = 1.5
"""


def described(guard: Guard) -> tuple[object, ...]:
    """Return everything that can be seen of a guard's settings."""
    return guard.name, guard.idempotent, guard.max_wait, [repr(one) for one in guard.policies]


@pytest.mark.parametrize("text", [EVERYTHING, OTHERS], ids=["vendor", "other"])
def test_what_is_written_makes_the_same_guard(text: str):
    """Guards can be read from what was written of them, and then look the same."""
    (guard,) = guards_from_toml(text, names=FUNCTIONS).values()
    written = guards_to_toml([guard])
    assert "unwritten" not in written
    (again,) = guards_from_toml(written, names=FUNCTIONS, replace=True).values()
    assert described(again) == described(guard)
    assert guards_to_toml([again]) == written


def test_the_recommended_stack_is_written():
    """Defaults are left out, and objects become tables."""
    guard = Guard.standard("vendor", on=(ConnectionError, TimeoutError), timeout=0.5, limit=20)
    written = guards_to_toml([guard])
    assert 'break_for = { kind = "growing", base = 0.25, cap = 1.0 }' in written
    assert "budget = true" in written
    (again,) = guards_from_toml(written, replace=True).values()
    assert described(again) == described(guard)


def test_values_of_the_user_are_not_written():
    """A static answer may be a secret; what has no form in TOML is named."""
    fallback = Fallback(static("s3cret"))
    chaos = Chaos(0.5, error=lambda: ValueError("s3cret"))
    retry = Retry(on=OSError, backoff=lambda attempt: 0.1 * attempt)
    written = guards_to_toml([Guard('my "vendor"', fallback, retry, chaos)])
    assert "s3cret" not in written
    (table,) = tomllib.loads(written)["guards"].values()
    assert table["unwritten"] == ["retry: backoff", "chaos"]
    assert list(tomllib.loads(written)["guards"]) == ['my "vendor"']
    assert update_from_toml(written) == []
    with pytest.raises(ValueError, match="make this guard in code"):
        guards_from_toml(written, replace=True)


def test_live_guards_are_updated():
    """Only what differs is changed, and the guards stay those that they were."""
    guard = Guard("vendor", Bulkhead(20), Timeout(30.0))
    written = guards_to_toml([guard]).replace("30.0", "0.5").replace("limit = 20", "limit = 5")
    told = update_from_toml(written)
    assert told == ["guard 'vendor', bulkhead: limit", "guard 'vendor', timeout: seconds"]
    assert [repr(one) for one in guard.policies] == [repr(Bulkhead(5)), repr(Timeout(0.5))]
    assert update_from_toml(written) == []


def test_an_update_changes_everything_or_nothing():
    """If one setting is refused, those before it are as they were."""
    guard = Guard("vendor", Timeout(30.0), Retry(on=OSError), Timeout(3.0))
    written = guards_to_toml([guard]).replace("30.0", "20.0").replace("3.0", "-1.0")
    with pytest.raises(ValueError, match="seconds") as caught:
        update_from_toml(written)
    assert "nothing was changed" in caught.value.__notes__[0]
    assert guard.policies[0].seconds == 30.0
    with pytest.raises(ValueError, match="has other policies"):
        update_from_toml('[[guards.vendor.policies]]\npolicy = "timeout"\nseconds = 1.0')
    with pytest.raises(KeyError, match="no live guard"):
        update_from_toml('[[guards.nobody.policies]]\npolicy = "timeout"\nseconds = 1.0')


@pytest.mark.parametrize(
    ("policy", "changed", "key"),
    [
        (Retry(on=OSError, backoff=lambda _retry: 0.125), "backoff = 0.5", "backoff"),
        (Timeout(adaptive_timeout(floor=0.1, cap=2.0)), "seconds = 0.5", "seconds"),
        (Bulkhead(5, max_waiting=3), "max_waiting = 1", "max_waiting"),
        (Breaker(break_for=lambda _opens: 0.125), "break_for = 0.5", "break_for"),
        (RateLimit("7/s", burst=3), 'limits = ["9/s"]', "limits"),
        (AdaptiveLimit(max_wait=0.25), "max_wait = 0.5", "max_wait"),
        (Hedge(quantile(0.9)), "delay = 0.5", "delay"),
        (Throttle(k=3.0), "k = 2.5", "k"),
    ],
    ids=lambda one: getattr(one, "kind", ""),
)
def test_a_failed_update_leaves_the_live_values(policy: Policy, changed: str, key: str):
    """Functions too, which have no form in TOML: the very values that there were are put back."""
    guard = Guard("vendor", policy, Timeout(3.0))
    before = argument_of(policy, key)
    lines = guards_to_toml([guard]).replace("3.0\n", "-1.0\n").splitlines()
    kept = [line for line in lines if not line.startswith(f"{key} =")]
    place = kept.index(f'policy = "{policy.kind}"')
    written = "\n".join([*kept[: place + 1], changed, *kept[place + 1 :]])
    with pytest.raises(ValueError, match="seconds"):
        update_from_toml(written)
    assert repr(argument_of(policy, key)) == repr(before)


@pytest.mark.parametrize("line", ["idempotent = false", "max_wait = 3.0", "standard = 3"])
def test_what_an_update_cannot_change_is_refused(line: str):
    """It is not ignored."""
    guard = Guard("vendor", Timeout(3.0))
    text = f'[guards.vendor]\n{line}\n[[guards.vendor.policies]]\npolicy = "timeout"\nseconds = 2.0'
    with pytest.raises(ValueError, match="is fixed while it lives"):
        update_from_toml(text)
    assert guard.policies[0].seconds == 3.0


@pytest.mark.parametrize(
    "text",
    [
        "guards = 3",
        "pools = 3",
        "[guards]\nvendor = 3",
        "[pools]\ndatabase = 3",
        "[guards.vendor]\npolicies = 3",
        "[guards.vendor]\npolicies = [3]",
    ],
)
def test_updates_of_another_shape_are_refused(text: str):
    """The message says what to write."""
    guard = Guard("vendor", Timeout(3.0))
    with pytest.raises(TypeError, match="must be"):
        update_from_toml(text)
    assert guard.policies[0].seconds == 3.0


def test_pools_are_updated():
    """Pools are found by their name."""
    pool = Pool(object, name="tuned", max_size=3)
    assert update_from_toml("[pools.tuned]\nmax_size = 7\n") == ["pool 'tuned': max_size"]
    assert pool.settings.max_size == 7
    with pytest.raises(KeyError, match="no live pool"):
        update_from_toml("[pools.nobody]\nmax_size = 7\n")
