"""Jobs over HTTP: accepted, asked after, waited for, cancelled; by their owners alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.openapi.models import OpenAPI
from hypothesis import given
from hypothesis import strategies as st

from seawall.durable.http.responses import Reply
from seawall.durable.jobs.http_api import JobsApi, Prefer, read_prefer
from seawall.durable.jobs.jobs import Jobs
from seawall.durable.jobs.worker import JobHandle, JobWorker
from seawall.web import Incoming
from seawall.web.fastapi import protect
from tests.durable.conftest import Opening, opening_by
from tests.durable.jobs.test_jobs import world_of
from tests.durable.postgres import Postgres
from tests.web.support import ask


@pytest.fixture(params=["asyncpg", "sqlite"])
def opening(request: pytest.FixtureRequest, postgres: Postgres, tmp_path: Path) -> Opening:
    """Return what opens each kind of database: the drivers are compared below HTTP."""
    return opening_by(request.param, postgres, tmp_path)


def who(incoming: Incoming) -> str | None:
    return incoming.header("x-user")


@asynccontextmanager
async def client_of(
    app: Any, user: str = "ann", root: str = ""
) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, root_path=root)
    headers = {"x-user": user} if user else {}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://service", headers=headers
    ) as client:
        yield client


def submitting(api: JobsApi) -> Any:
    """Return an app whose POST /reports submits a job, and that has the status below it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/reports":
            await api(scope, receive, send)
            return
        message = await receive()
        reply = await api.submitted(scope, "report", json.loads(message["body"] or b"null"))
        await reply(scope, receive, send)

    return app


def test_from_202_to_the_result(opening: Opening):
    """A job is accepted with its place, asked after with a pause, and its result is there."""

    async def report(job: JobHandle) -> Any:
        return {"for": job.payload}

    async def main() -> None:
        async with world_of(opening) as world:
            jobs = Jobs(world.database, result_ttl=100.0, gone_for=100.0)
            api = JobsApi(jobs, scope=who)
            async with client_of(submitting(api)) as client:
                answer = await client.post("/reports", json=7, headers={"idempotency-key": "k"})
                assert answer.status_code == 202
                told = answer.json()
                assert told.keys() == {"id", "state", "status_url"}
                assert answer.headers["location"] == told["status_url"] == f"/jobs/{told['id']}"
                assert answer.headers["retry-after"] == "1"
                again = await client.post("/reports", json=7, headers={"idempotency-key": '"k"'})
                assert again.json() == told
                other = await client.post("/reports", json=8, headers={"idempotency-key": "k"})
                assert other.status_code == 422
                assert other.headers["content-type"] == "application/problem+json"
                wrong = await client.post("/reports", json=8, headers={"idempotency-key": "a b"})
                assert wrong.status_code == 400
                await world.pass_(40)
                status = await client.get(told["status_url"])
                assert (status.status_code, status.json()["state"]) == (200, "queued")
                assert status.headers["retry-after"] == "10"
                assert status.headers["cache-control"] == "no-store"
                early = await client.get(f"{told['status_url']}/result")
                assert (early.status_code, early.headers["retry-after"]) == (409, "10")
                assert await JobWorker(jobs, {"report": report}).run_once() == 1
                status = await client.get(told["status_url"])
                assert status.json()["result"] == {"for": 7}
                assert status.json()["progress"] == 1.0
                assert "retry-after" not in status.headers
                result = await client.get(f"{told['status_url']}/result")
                assert (result.json(), result.headers["x-content-type-options"]) == (
                    {"for": 7},
                    "nosniff",
                )
                done = await client.post("/reports", json=7, headers={"idempotency-key": "k"})
                assert (done.status_code, done.json()["result"]) == (200, {"for": 7})
                assert done.headers["content-location"] == told["status_url"]
                head = await client.head(told["status_url"])
                assert (head.status_code, head.content) == (200, b"")
                await world.pass_(100)
                assert (await client.get(told["status_url"])).status_code == 410
                await jobs.acleanup()
                assert (await client.get(told["status_url"])).status_code == 410
                await world.pass_(100)
                await jobs.acleanup()
                assert (await client.get(told["status_url"])).status_code == 404

    asyncio.run(main())


def test_who_prefers_to_wait(opening: Opening):
    """A job that ends in time is answered with its result; else, and beyond the bound, with 202."""
    go = asyncio.Event()

    async def report(_job: JobHandle) -> str:
        await go.wait()
        return "done"

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=who, max_wait=20.0, max_waiting=1)
            worker = JobWorker(jobs, {"report": report})
            task = asyncio.create_task(worker.run())
            async with client_of(submitting(api)) as client:
                prefer = {"prefer": "respond-async, wait=900"}
                waiting = asyncio.create_task(client.post("/reports", json=1, headers=prefer))
                while not api.snapshot()["waiting"]:
                    await asyncio.wait([waiting], timeout=0.01)
                crowded = await client.post("/reports", json=2, headers=prefer)
                assert crowded.status_code == 202
                assert crowded.headers["preference-applied"] == "respond-async"
                go.set()
                answer = await waiting
                assert (answer.status_code, answer.json()["result"]) == (200, "done")
                assert answer.headers["preference-applied"] == "wait=20"
                status = await client.get(
                    crowded.json()["status_url"], headers={"prefer": "wait=9"}
                )
                assert status.json()["result"] == "done"
            api.max_wait = 1.0
            worker.stop(0.0)
            await task
            async with client_of(submitting(api)) as client:
                late = await client.post("/reports", json=3, headers={"prefer": "wait=5"})
                assert late.status_code == 202
                assert late.headers["preference-applied"] == "wait=1"
            assert api.snapshot()["waiting"] == 0
            assert api.snapshot()["not_waited"] == 1

    asyncio.run(main())


def test_cancelling_over_http(opening: Opening):
    """One that waits is cancelled at once, one at work is asked to stop, one that ended is 409."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=who)
            async with client_of(submitting(api)) as client:
                first, second, third = [
                    (await client.post("/reports", json=n)).json() for n in range(3)
                ]
                gone = await client.delete(first["status_url"])
                assert (gone.status_code, gone.json()["state"]) == (200, "cancelled")
                claims = await jobs.aclaim(["report"], 2, owner="w")
                asked = await client.post(f"{second['status_url']}/cancel")
                assert (asked.status_code, asked.json()["cancelling"]) == (202, True)
                for claim in claims:
                    if claim.id == third["id"]:
                        await jobs.afail(claim, "internal host 10.0.0.1", retry=False)
                late = await client.delete(third["status_url"])
                assert late.status_code == 409
                failed = await client.get(third["status_url"])
                assert failed.json()["error"] == "The job failed."
                assert "10.0.0.1" not in failed.text
                assert (await client.get(f"{third['status_url']}/result")).status_code == 409
                wrong = await client.put(third["status_url"])
                assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD, DELETE")
                api.show_errors = True
                failed = await client.get(third["status_url"])
                assert failed.json()["error"] == "internal host 10.0.0.1"

    asyncio.run(main())


def test_strangers_learn_nothing(opening: Opening):
    """For another principal, or none, a job answers like one that never existed."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=who)
            async with client_of(submitting(api)) as client:
                url = (await client.post("/reports", json=1)).json()["status_url"]
            answers = []
            for user, path in [
                ("eve", url),
                ("eve", f"{url[:-1]}0"),
                ("", url),
                ("eve", "/jobs/x"),
                ("ann", "/jobs/" + "x" * 5000),
                ("ann", "/jobs"),
                ("ann", f"{url}/other"),
            ]:
                async with client_of(submitting(api), user) as client:
                    asked = [
                        await client.get(path),
                        await client.delete(path),
                        await client.get(path, headers={"prefer": "wait=5"}),
                    ]
                    answers += [
                        (a.status_code, sorted(a.headers.items()), a.content) for a in asked
                    ]
            assert all(answer == answers[0] for answer in answers)
            assert answers[0][0] == 404
            async with client_of(submitting(api), "") as client:
                assert (await client.post("/reports", json=1)).status_code == 403
            async with client_of(submitting(api)) as client:
                assert (await client.get(url)).json()["state"] == "queued"

    asyncio.run(main())


def test_in_a_fastapi_app(opening: Opening):
    """Mounted in FastAPI: a route submits in its own transaction, and answers after the commit."""
    from fastapi import FastAPI, Request

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=who, inline_result=4)
            app = FastAPI()
            app.mount("/jobs", api)

            @app.post("/orders")
            async def order(request: Request) -> Any:
                scope = api.scope_of(request)
                assert scope is not None
                job = await jobs.asubmit(None, "report", scope=scope)
                return (await api.answer(request, job)).response()

            async with client_of(app, root="/v1") as client:
                answer = await client.post("/v1/orders")
                url = answer.headers["location"]
                assert (answer.status_code, url) == (202, f"/v1/jobs/{answer.json()['id']}")
                status = await client.get(url)
                assert status.json()["status_url"] == url
                (claim,) = await jobs.aclaim(["report"], owner="w")
                assert await jobs.asucceed(claim, "a longer result")
                status = await client.get(url)
                assert status.json()["result_url"] == f"{url}/result"
                result = await client.get(f"{url}/result")
                assert result.json() == "a longer result"
            assert api.accepted(await jobs.aget(claim.id, scope="ann")).status == 200

    # FastAPI finds the annotations of a route among the globals.
    globals()["Request"] = Request
    asyncio.run(main())


class Login:
    """Says who it is in a scope of its own, as some middlewares do."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            name = dict(scope["headers"]).get(b"x-user", b"").decode()
            scope = {**scope, "user": name}
        await self.app(scope, receive, send)


def test_behind_the_edge_and_a_login(opening: Opening):
    """Whose a job is, is what was found out on the way to the route, and not at the edge."""
    from fastapi import FastAPI, Request

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=lambda incoming: incoming.scope.get("user"))
            app = FastAPI()
            app.mount("/jobs", api)
            app.add_middleware(Login)
            edge = protect(app)

            @app.post("/reports")
            async def report(request: Request) -> Any:
                needs = "must" in request.query_params
                return (await api.submitted(request, "report", required=needs)).response()

            for user, same in [("ann", "ann"), ("bob", "bob"), ("u" * 300, "u" * 299 + "v")]:
                async with client_of(app, user) as client:
                    answer = await client.post("/reports", headers={"idempotency-key": "k"})
                    assert answer.status_code == 202
                    url = answer.headers["location"]
                    assert (await client.get(url)).json()["state"] == "queued"
                async with client_of(app, "eve" if user == same else same) as client:
                    assert (await client.get(url)).status_code == 404
            async with client_of(app, "ann") as client:
                answer = await client.post("/reports?must")
                assert (answer.status_code, answer.json()["reason"]) == (400, "key_missing")
                keyed = {"idempotency-key": "k"}
                assert (await client.post("/reports?must", headers=keyed)).status_code == 202
            async with client_of(app, "") as client:
                assert (await client.post("/reports")).status_code == 403
                assert (await client.get(url)).status_code == 404
            assert (await jobs.acounts())["queued"][0] == 3
            edge.guard.close()

    globals()["Request"] = Request
    asyncio.run(main())


def test_a_scope_of_two_parts(opening: Opening):
    """Tenant and user form one unambiguous scope; without either there is none."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            api = JobsApi(jobs, scope=lambda seen: (seen.header("x-user"), seen.header("x-team")))
            async with client_of(submitting(api)) as client:
                assert (await client.post("/reports", json=1)).status_code == 403
                team = {"x-team": "red"}
                answer = await client.post("/reports", json=1, headers=team)
                url = answer.json()["status_url"]
                assert (await client.get(url, headers=team)).status_code == 200
                assert (await client.get(url, headers={"x-team": "blue"})).status_code == 404

    asyncio.run(main())


def test_what_cannot_be_taken_is_not_the_servers_fault(opening: Opening):
    """A payload that is too large or no JSON is 422; no room is 503, and when to ask again."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, max_payload=100, max_size=1)
            api = JobsApi(jobs, scope=who)
            async with client_of(submitting(api)) as client:
                for body in (json.dumps("x" * 100), "NaN", "[" * 70 + "]" * 70):
                    assert (await client.post("/reports", content=body)).status_code == 422
                assert (await client.post("/reports", json=1)).status_code == 202
                full = await client.post("/reports", json=2)
                assert (full.status_code, full.json()["reason"]) == (503, "queue_full")
                assert int(full.headers["retry-after"]) >= 1
            with pytest.raises(ValueError, match="priority"):
                await api.submitted(
                    {"type": "http", "headers": [(b"x-user", b"ann")]}, "report", priority=10
                )

    asyncio.run(main())


@given(st.lists(st.text(st.characters(max_codepoint=255), max_size=60), max_size=3))
def test_preferences_are_read_whatever_they_say(values: list[str]):
    """Nothing that a client writes raises, and a wait is a number of seconds or none."""
    prefer = read_prefer([(b"prefer", value.encode("latin-1")) for value in values])
    assert prefer.wait is None or prefer.wait >= 0


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("wait=5", Prefer(5)),
        ('Wait="5" ; x=y', Prefer(5)),
        ("respond-async, wait=10", Prefer(10, respond_async=True)),
        ("wait=5, wait=7", Prefer(5)),
        ("wait", Prefer()),
        ("wait=-1", Prefer()),
        ("wait=1.5", Prefer()),
        ("wait=99999999999", Prefer()),
        ("return=minimal", Prefer()),
    ],
)
def test_preferences(said: str, read: Prefer):
    """`wait` is whole seconds, as RFC 7240 has it."""
    assert read_prefer([(b"prefer", said.encode())]) == read


def test_what_is_wrong_is_refused_at_once(opening: Opening):
    """Without a scope, or with a base that is no path, there is no app."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            with pytest.raises(TypeError):
                JobsApi(jobs)  # type: ignore[call-arg]
            with pytest.raises(TypeError):
                JobsApi(jobs, scope=None)  # type: ignore[arg-type]

            async def asked(_incoming: Incoming) -> str:
                return "ann"

            with pytest.raises(TypeError, match="plain function"):
                JobsApi(jobs, scope=asked)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="shorter time first"):
                JobsApi(jobs, scope=who, poll=(5.0, 1.0))
            with pytest.raises(TypeError, match="two times"):
                JobWorker(jobs, {"report": who}, poll=1.0)  # type: ignore[arg-type, dict-item]
            with pytest.raises(ValueError, match="such as '/jobs'"):
                JobsApi(jobs, scope=who, base="jobs/")
            assert repr(JobsApi(jobs, scope=who)).endswith("at '/jobs'>")

    asyncio.run(main())


def test_a_fastapi_app_describes_the_api(opening: Opening):
    """OpenAPI has the routes of the API, and the key of the routes that submit jobs."""

    async def main() -> None:
        async with opening() as database:
            api = JobsApi(Jobs(database), scope=lambda _: "acme")
            app = FastAPI()
            app.mount("/jobs", api)

            @app.post("/reports/{number}", status_code=202)
            async def report(number: int, request: Request) -> Any:
                return (await api.submitted(request, "report", number, required=True)).response()

            api.describe(app, submits=["/reports/{number}"], required=True)
            schema = app.openapi()
            OpenAPI.model_validate(schema)
            submitting = schema["paths"]["/reports/{number}"]["post"]
            assert {"202", "400", "422"} <= set(submitting["responses"])
            assert submitting["parameters"][-1]["name"] == "Idempotency-Key"
            assert {"200", "202", "404", "409", "410"} == set(
                schema["paths"]["/jobs/{id}"]["delete"]["responses"]
            )
            assert {"get"} == set(schema["paths"]["/jobs/{id}/result"]) - {"parameters"}
            assert {"post"} == set(schema["paths"]["/jobs/{id}/cancel"]) - {"parameters"}

    asyncio.run(main())


def test_an_answer_without_content_has_no_length():
    """A job whose result is nothing, and a HEAD: no body; a 204 has no Content-Length either."""

    async def main() -> None:
        nothing = await ask(Reply(204, [], b""))
        assert (nothing.status, nothing.headers, nothing.body) == (204, {}, b"")
        head = await ask(Reply(200, [], b"body"), method="HEAD")
        assert (head.headers["content-length"], head.body) == ("4", b"")

    asyncio.run(main())
