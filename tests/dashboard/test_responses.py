from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Bulkhead, Guard
from seawall.dashboard import Dashboard
from seawall.dashboard.responses import POLICY, to_json
from seawall.testing import run_virtual
from tests.dashboard.app_support import ORIGIN, Others, Shown, Viewer, get
from tests.dashboard.pods_support import view
from tests.dashboard.views_support import places, replaced
from tests.support import let_pass

PAYLOADS = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    '" onload="alert(1)',
    "<!--",
    "\u2028\u2029&amp;",
    "data: x\n\nevent: message\ndata: {}",
)


def operated(**options: Any) -> Shown:
    return Shown(operate=lambda _: "ann", **options)


# --- What is sent ---


@pytest.mark.parametrize("path", ["/", "/state", "/session", "/nothing", "/act", "/page/x.js"])
def test_every_answer_is_locked_down(path: str):
    """Whatever is answered, its headers allow no frame, sniffing, keeping, or other origin."""

    async def main() -> None:
        refused = Dashboard(allow=lambda _: False)
        for app in (operated(), refused):
            headers = (await get(app, path, ORIGIN)).headers
            assert headers["content-security-policy"] == POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cache-control"] == "no-store"
            assert headers["cross-origin-resource-policy"] == "same-origin"
            assert headers["cross-origin-opener-policy"] == "same-origin"
            assert headers["x-frame-options"] == "DENY"
            assert "camera=()" in headers["permissions-policy"]
            assert not [name for name in headers if name.startswith("access-control")]

    run_virtual(main())


def test_the_policy_lets_only_our_own_files_run():
    """No inline script, no eval, no other host, no frame, no form: exactly this policy."""
    assert POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    )


@pytest.mark.parametrize("name", PAYLOADS)
def test_names_break_out_of_nothing(name: str):
    """Any guard name becomes plain JSON on one line, without markup."""

    async def main() -> None:
        guard = Guard(name, Bulkhead(1))
        app = Shown(title=name, operate=lambda _: name)
        viewer = Viewer(app)
        await let_pass(0.5)
        body = (await get(app, "/state")).body
        assert not re.search(rb"[<>&\x00-\x1f\x7f-\xff]", body)
        assert json.loads(body)["views"][0]["guards"][0]["name"] == name
        assert viewer.answer.body.count(b"\n") == 5
        assert viewer.events[0]["title"] == name
        await viewer.leave()
        guard.close()

    run_virtual(main())


TROUBLE = {"id": "x", "tone": "bad", "where": "w", "what": "?", "advice": "a", "since": 1.0}
ROW = {"kind": "k", "name": "n", "tone": "ok", "state": "s", "facts": [["a", "b"]]}
ROW |= {"gauge": None, "track": None}


@pytest.mark.parametrize("payload", [*PAYLOADS, "\r", "\u2028", "\x00", "\ud800", "A" * 100_000])
def test_a_hostile_pod_breaks_out_of_nothing(payload: str):
    """Whatever another pod writes into each of its texts, a message is one line without markup."""

    async def main() -> None:
        whole: Any = view(troubles=[TROUBLE], sections={"s": [ROW]})
        texts = [place for place in places(whole) if isinstance(_at(whole, place), str)]
        assert len(texts) > 30
        pods = [replaced(whole, [(place, payload)]) for place in texts]
        for number, pod in enumerate(pods):
            pod["pod"]["name"] += f"-{number}"
        pods.append({**whole, "sections": {payload: [ROW]}})
        app = Shown(pods=Others(*pods))
        viewer = Viewer(app)
        await let_pass(0.5)
        body = viewer.answer.body
        assert not re.search(rb"[<>&\x00-\x09\x0b-\x1f\x7f-\xff]", body)
        assert body.count(b"\n") == 5
        (message,) = viewer.events
        assert len(message["views"]) > 20
        assert "A" * 1000 not in json.dumps(message)
        await viewer.leave()

    run_virtual(main())


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


@given(st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
def test_json_has_no_character_that_could_end_a_script(value: Any):
    """Any text comes through whole, and none of it is markup, a line break, or not ASCII."""
    written = to_json({"x": value, str(value): 1})
    assert not re.search(rb"[<>&\x00-\x1f\x7f-\xff]", written)
    assert json.loads(written)["x"] == value


@given(
    st.text(max_size=30)
    | st.sampled_from(["../app.py", "..%2fapp.py", "/etc/passwd", "....//x", "index.html\0", "."])
)
def test_no_path_leads_out_of_the_table_of_files(name: str):
    """What is asked for is looked up by name: a path that is none of them is not found."""

    async def main() -> None:
        answer = await get(Shown(), f"/page/{name}")
        assert answer.status == 404

    asyncio.run(main())
