"""Operator actions on a guard of this process: isolate or close a breaker, change a setting.

Promises:
- Only actions that the page offers are done; an action or setting that its layer does not have is
  refused.
- The policy itself checks values, and invalid ones change nothing.
- Each action is logged once, with the operator, in one line whatever the names are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple

from seawall import registry
from seawall.dashboard.bounds import MOST_CHANGES
from seawall.dashboard.responses import RequestRefused, unprocessable
from seawall.dashboard.views import LayerView, SettingChange, View
from seawall.policies.breaker import Breaker
from seawall.runtime.policy import Policy

log: Final = logging.getLogger("seawall.dashboard")

LONGEST: Final = 500
"""Maximum length of a name or a value in characters."""
ELSEWHERE_WITHIN: Final = 10.0
"""Timeout in seconds for another pod to do a requested action."""

NOT_FROM_HERE: Final = (
    "Open that pod's own dashboard to act on it. A breaker that is shared follows on all pods when"
    " it is changed on one."
)

_DONE: Final = {"isolate": "Isolated", "close": "Closed", "change": "Changed"}
_MEMBERS: Final = frozenset({"pod", "guard", "layer", "act", "key", "changes"})


class GuardAction(NamedTuple):
    """A requested action."""

    pod: str
    guard: str
    layer: int
    act: str
    key: str | None
    changes: dict[str, Any]


def parse_action(body: Any) -> GuardAction:
    """Parse the JSON of a request; raise `RequestRefused` if it is no valid action."""
    if not isinstance(body, dict) or not body.keys() <= _MEMBERS:
        raise unprocessable(f"Write an object with {', '.join(sorted(_MEMBERS))}.")
    for name in ("pod", "guard", "act"):
        if not _is_text(body.get(name)):
            raise unprocessable(f"{name}: write text.")
    layer = body.get("layer")
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise unprocessable("layer: write its place in the stack, from 0.")
    act, key = body["act"], body.get("key")
    if act not in _DONE:
        raise unprocessable(f"act: write one of {', '.join(_DONE)}.")
    if key is not None and (act == "change" or not _is_text(key)):
        raise unprocessable("key: write text for a breaker that has one for each key, else null.")
    changes = _read_changes(body.get("changes"))
    if (act == "change") != bool(changes):
        raise unprocessable("changes: they belong to the act 'change', and to no other.")
    return GuardAction(body["pod"], body["guard"], layer, act, key, changes)


def _read_changes(changes: Any) -> dict[str, Any]:
    if changes is None:
        return {}
    if not isinstance(changes, dict) or len(changes) > MOST_CHANGES:
        raise unprocessable(f"changes: write an object with at most {MOST_CHANGES} settings.")
    for name, value in changes.items():
        if not _is_text(name) or not (_is_text(value) or _is_number(value)):
            raise unprocessable("changes: write numbers or text by the name of the setting.")
    return changes


def act_here(asked: GuardAction, view: View, operator: str, client: str) -> str:
    """Act on a guard of this process, as far as `view` offers it; return a sentence about it."""
    layer = _offered(asked, view)
    policy = _policy(asked, layer)
    if asked.act == "change":
        _change(policy, layer, asked.changes)
        done = ", ".join(f"{name}={value!r}" for name, value in asked.changes.items())
        sentence = f"Changed {layer['title']} of {asked.guard}: {done}."
    else:
        _command(policy, asked)
        of = "" if asked.key is None else f", key {asked.key}"
        sentence = f"{_DONE[asked.act]} {layer['title']} of {asked.guard}{of}."
    log_action(asked, operator, client)
    return sentence


async def act_on_pod(asked: GuardAction, pods: Any, report: Callable[..., None]) -> str:
    """Let another pod do the action; return its sentence about it."""
    try:
        async with asyncio.timeout(ELSEWHERE_WITHIN):
            return str(await pods.act(asked.pod, asked._asdict()))
    except RequestRefused:
        raise
    except Exception as error:
        report("act", logging.WARNING, "a pod could not be acted on: %r", error)
        raise RequestRefused(409, "Conflict", "That pod could not be acted on.") from error


def log_action(asked: GuardAction, operator: str, client: str) -> None:
    """Log what was done, and the operator."""
    # repr: a name with a line break in it must not look like a separate record.
    log.warning(
        "dashboard: operator %r (%s) did %s to guard %r, layer %d, key %r, changes %r, pod %r",
        operator, client, asked.act, asked.guard, asked.layer, asked.key, asked.changes, asked.pod,
        extra={"seawall_operator": operator, "seawall_act": asked.act}
    )  # fmt: skip


def _offered(asked: GuardAction, view: View) -> LayerView:
    """Return the layer of the action, if it offers that action."""
    stack = next((guard["stack"] for guard in view["guards"] if guard["name"] == asked.guard), None)
    if stack is None:
        raise unprocessable("There is no such guard.")
    if not 0 <= asked.layer < len(stack):
        raise unprocessable("The guard has no such layer.")
    layer = stack[asked.layer]
    title = layer["title"]
    if asked.act != "change":
        if asked.act not in layer["acts"]:
            raise unprocessable(f"{title} cannot be {_DONE[asked.act].lower()} as it is now.")
        return layer
    offered = {change["name"] for change in layer["changes"]}
    unknown = sorted(asked.changes.keys() - offered)
    if unknown:
        listed = ", ".join(sorted(offered)) or "nothing"
        raise unprocessable(f"{title}: {unknown[0]!r} cannot be changed here; {listed} can.")
    return layer


def _policy(asked: GuardAction, layer: LayerView) -> Policy:
    """Return the policy of that layer, which may have changed since the view was made."""
    try:
        policy: Policy = registry.get_guard(asked.guard).bounds[asked.layer].policy
    except LookupError:
        raise unprocessable("The guard is not there any more.") from None
    if policy.kind != layer["policy"]:
        raise unprocessable("The guard is another one by now: look again.")
    return policy


def _command(policy: Policy, asked: GuardAction) -> None:
    if not isinstance(policy, Breaker):
        raise unprocessable(f"{type(policy).__name__} cannot be {_DONE[asked.act].lower()}.")
    key: Hashable = None
    if policy.key is None:
        if asked.key is not None:
            raise unprocessable("key: this breaker has none; write null.")
    else:
        key = _known_key(policy, asked.key)
    try:
        policy.isolate(key) if asked.act == "isolate" else policy.close(key)
    except (RuntimeError, TypeError, ValueError) as error:
        raise unprocessable(str(error)[:LONGEST]) from error


def _known_key(policy: Breaker, key: str | None) -> Hashable:
    """Return the key that is shown as `key`: the text itself, or the key with that text."""
    known = policy.models()
    if key is None:
        raise unprocessable("key: this breaker has one for each key; write which.")
    if key in known:
        return key
    found = [one for one in known if str(one) == key]
    if len(found) != 1:
        raise unprocessable("key: the breaker knows no such key.")
    return found[0]


def _change(policy: Policy, layer: LayerView, changes: Mapping[str, Any]) -> None:
    offered: dict[str, SettingChange] = {change["name"]: change for change in layer["changes"]}
    values = {name: _fitting(offered[name], value) for name, value in changes.items()}
    try:
        policy.update(**values)
    except (TypeError, ValueError) as error:
        raise unprocessable(str(error)[:LONGEST]) from error


def _fitting(change: SettingChange, value: Any) -> Any:
    """Return a value of the type that the setting has; JavaScript has only one type of numbers."""
    if change["kind"] == "text":
        if not isinstance(value, str):
            raise unprocessable(f"{change['name']}: write text.")
        return value
    if isinstance(value, str):
        raise unprocessable(f"{change['name']}: write a number.")
    whole = isinstance(change["value"], int) and isinstance(value, float) and value.is_integer()
    return int(value) if whole else value


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**53 and isfinite(value)
