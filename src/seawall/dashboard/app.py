"""The dashboard: an ASGI app that shows this process live, and lets operators act on it.

    dashboard = Dashboard(allow=may_look)
    app.mount("/seawall", dashboard)

Promises:
- Only viewers that `allow` or `local` admits can look, and a dashboard that would admit everyone
  cannot be created.
- Only operators that `operate` names can act.
- No page of another origin can make a browser act (`csrf`).
- No shown text can run as a script.
- Failures in a callback or in another pod do not stop the page.

Routes:

    GET  /             the page
    GET  /page/<file>  its scripts and styles
    GET  /events       a message each `every` seconds, as server-sent events
    GET  /state        one message as JSON
    GET  /hours        the history of one guard over the last hour, or the last twelve, as JSON
    GET  /audit        what the guards of this process show, against the checklist, as JSON
    GET  /snapshot     the guards and pools of this process with their settings, for `seawall tune`
    GET  /tune         proposals for one guard of this process, from its own numbers, as JSON
    GET  /session      the operator, and the token for actions
    POST /act          isolate or close a breaker, change a setting
    POST /keys         look up an idempotency key, or forget it
    GET  /lists        the queues, jobs and outboxes that can be listed
    GET  /list         a page of one of them
    GET  /item         a job, dead letter or event of one
    POST /work         retry or drop some of them
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self
from urllib.parse import quote
from weakref import finalize, ref

from seawall import _checks as check
from seawall._forks import survives_fork
from seawall.clock import current_clock
from seawall.dashboard import responses as _assets
from seawall.dashboard.actions.guard_actions import (
    NOT_FROM_HERE,
    act_here,
    act_on_pod,
    log_action,
    parse_action,
)
from seawall.dashboard.actions.idempotency_keys import answer_about_keys
from seawall.dashboard.actions.work_lists import READS as WORK_READS
from seawall.dashboard.actions.work_lists import act_on_work
from seawall.dashboard.authorization import Ask, Authorization
from seawall.dashboard.bounds import LONGEST_NAME, LONGEST_TEXT, shown
from seawall.dashboard.csrf import Sessions, check_site
from seawall.dashboard.history import STEPS
from seawall.dashboard.responses import (
    JSON,
    RequestRefused,
    expect,
    forbidden,
    send_answer,
    send_refusal,
    to_json,
    unavailable,
    unprocessable,
)
from seawall.dashboard.sampler import Sampler
from seawall.dashboard.stream import Stream
from seawall.dashboard.summary import PageLinks
from seawall.dashboard.visit import Visit, json_body
from seawall.runtime.mutex import Mutex
from seawall.web.asgi_types import Send
from seawall.web.request import path_below_root

if TYPE_CHECKING:
    from seawall.dashboard.pods.store_pods import StorePods
    from seawall.dashboard.watcher import Watcher

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]

FIRST_WITHIN: Final = 10.0
"""Timeout in seconds for the first frame."""


class Dashboard:
    """Shows this process, and the pods that it knows, to permitted viewers."""

    _scripts: ClassVar[tuple[str, ...]] = ()
    """Scripts and styles of a subclass, which its `_asset` returns; added to the page."""
    _posts: ClassVar[tuple[str, ...]] = ()
    """Further routes of a subclass, for its `_post`."""
    _shows_itself: ClassVar[bool] = True
    """Whether this process is shown too; otherwise only the other pods are."""

    def __init__(
        self,
        *,
        allow: Ask | None = None,
        local: bool = False,
        operate: Ask | None = None,
        origins: Sequence[str] | None = None,
        shared: Any = None,
        pods: Any = None,
        pod: str | None = None,
        title: str = "Seawall",
        every: float = 1.0,
        max_viewers: int = 64,
        secret: str | bytes | None = None,
        runbook: str | None = None,
        trace: str | None = None,
    ) -> None:
        """Let viewers in for whom `allow(visit)` is True; with `local`, only this machine.

        `operate(visit)` returns the name of the operator, or None; without it, no viewer can act.
        Both may be async. `origins` are the addresses at which browsers see the page, if it is
        behind a proxy.

        With `shared`, a store, the pods that share it are shown side by side, and this one
        publishes its view from now on, until `aclose` or `close`; `pods` is a custom source
        instead. Several pods behind one address need the same `secret`. `runbook` and `trace` are
        templates of addresses, with `{kind}` (of a problem) and `{trace_id}` in them: the page
        links to both.
        """
        self._authorization = Authorization(allow, operate, local=local, clock=current_clock())
        self._sessions = Sessions(secret, origins)
        if shared is not None and pods is not None:
            raise ValueError("shared and pods: give one of them; a store is a source of pods")
        if pods is not None and (isinstance(pods, type) or not hasattr(pods, "views")):
            raise TypeError(f"pods={pods!r}: pass an object with `async def views(self)`")
        for name, text in (("title", title), ("pod", pod)):
            if not (name == "pod" and text is None) and (not isinstance(text, str) or not text):
                raise TypeError(f"{name}={text!r}: write text, such as {name}='orders'")
        self._links = PageLinks(runbook, trace)
        self.title = title
        self.pod = pod
        self.every = check.seconds("every", every)
        self.max_viewers = check.count("max_viewers", max_viewers)
        self._shared = shared
        self._pods: Any = pods
        self._acts_elsewhere = callable(getattr(pods, "act", None))
        self._mutex = Mutex()
        self._publishing: tuple[Watcher, StorePods] | None = None
        self._stop_publishing: finalize[..., Any] | None = None
        self._samplers: dict[asyncio.AbstractEventLoop, Sampler] = {}
        self._viewers: set[Stream] = set()
        # The deadline of the request that starts the sampling must not apply to the sampling.
        self._context = copy_context()
        survives_fork(self)
        if shared is not None:
            self._publisher()

    def __repr__(self) -> str:
        who = "this machine" if self._authorization.local else "whom allow() lets in"
        acts = "read only" if self._authorization.operate is None else "operate() says who acts"
        return f"<Dashboard {self.title!r}: for {who}, {acts}, {len(self._viewers)} look>"

    # Extension points for subclasses

    def _asset(self, name: str) -> _assets.Asset | None:
        """Return a file of the page by its name."""
        return _assets.assets().get(name)

    async def _extra(self) -> dict[str, Any] | None:
        """Return additional data that is sent with each message."""
        return None

    async def _post(self, name: str, body: Any, operator: str) -> dict[str, Any]:
        """Handle a POST to one of `_posts`; a ValueError is reported to the client."""
        raise NotImplementedError

    def _new_watcher(self) -> Watcher:
        from seawall.dashboard.watcher import Watcher

        return Watcher(pod=self.pod, every=self.every)

    # Lifecycle

    async def __aenter__(self) -> Self:
        """Start sampling: in the lifespan of the app that it is mounted in."""
        self._authorization.check_exposure()
        self._sampler()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the streams and the sampling of this event loop; the next request starts them anew.

        If no other loop is active, this pod is reported as gone, as by `close`.
        """
        sampler = self._samplers.pop(asyncio.get_running_loop(), None)
        if sampler is not None:
            await sampler.stop()
        if not any(other.on for loop, other in self._samplers.items() if not loop.is_closed()):
            self.close()

    def close(self) -> None:
        """End everything, in whatever loop it runs, and report this pod as gone to the others.

        From any thread. The store stays open, and the next request starts everything anew.
        """
        with self._mutex:
            stop, self._publishing, self._stop_publishing = self._stop_publishing, None, None
        if stop is not None:
            stop()
        for loop, sampler in list(self._samplers.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(sampler.cancel)

    def end_streams(self) -> None:
        """End all streams, from any thread: before a server is asked to stop.

        Browsers reconnect their viewers, if the service is still there.
        """
        for loop, sampler in list(self._samplers.items()):
            if not loop.is_closed():
                loop.call_soon_threadsafe(sampler.end_streams)

    def _sampler(self) -> Sampler:
        """Return the sampler of this event loop; start it if it is not running."""
        loop = asyncio.get_running_loop()
        sampler = self._samplers.get(loop)
        if sampler is not None and sampler.on:
            return sampler
        for other in [known for known in self._samplers if known.is_closed()]:
            self._samplers.pop(other, None)
        sampler = self._samplers[loop] = self._new_sampler()
        return sampler

    def _new_sampler(self) -> Sampler:
        shared = self._shared is not None
        watcher, pods = self._publisher() if shared else (self._new_watcher(), self._pods)
        operates = self._authorization.operate is not None
        return Sampler(
            watcher,
            pods,
            title=self.title,
            every=self.every,
            operable=(operates, operates and self._acts_elsewhere),
            extra=type(self)._extra,  # noqa: SLF001 - of a subclass
            report=self._authorization.report,
            context=self._context.copy(),
            shared=shared,
            shows_itself=self._shows_itself,
            owner=ref(self),
            links=self._links,
        )

    def _publisher(self) -> tuple[Watcher, StorePods]:
        """Return the watcher for all loops, and the publisher of its view to other pods."""
        from seawall.dashboard.pods.store_pods import StorePods

        with self._mutex:
            if self._publishing is None:
                watcher = self._new_watcher()
                pods = StorePods(self._shared, watcher, every=self.every)
                self._publishing = watcher, pods
                # The store keeps a reference to the publisher, so a dropped dashboard would not end
                # it.
                self._stop_publishing = finalize(self, _end_all, pods, watcher)
                self._stop_publishing.atexit = False
            return self._publishing

    def _after_fork(self) -> None:
        self._mutex = Mutex()
        self._samplers = {}
        self._viewers = set()

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or the lifespan if it is the whole app."""
        kind = scope["type"]
        if kind == "http":
            await self._serve(scope, receive, send)
        elif kind == "lifespan":
            await self._lifespan(receive, send)
        elif kind == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            raise RuntimeError(f"the dashboard answers HTTP requests, not {kind!r}")

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                try:
                    await self.__aenter__()
                except Exception as error:  # noqa: BLE001 - reported to the server, which ends
                    self._authorization.report("start", logging.ERROR, "%s", error)
                    await send({"type": "lifespan.startup.failed", "message": str(error)})
                    return
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = Visit.of(scope)
        head = visit.method == "HEAD"
        try:
            await self._authorization.admit(visit)
            await self._route(visit, receive, send, head=head)
        except RequestRefused as refusal:
            await send_refusal(send, refusal, head=head)

    async def _route(self, visit: Visit, receive: Receive, send: Send, *, head: bool) -> None:
        path = path_below_root(visit.scope)
        name = path.strip("/") if path.count("/") <= 2 else path  # noqa: PLR2004
        check_site(visit, page=not name)
        if name in ("act", "keys", "work") or name in self._posts:
            expect(visit.method, "POST")
            answer = await self._posted(name, visit, receive)
            await send_answer(send, 200, JSON, to_json(answer))
        elif name in _READS:
            expect(visit.method, "GET", "HEAD")
            await getattr(self, _READS[name])(visit, receive, send, head=head)
        elif name in _DOCUMENTS or name in WORK_READS:
            expect(visit.method, "GET", "HEAD")
            document = await self._document(name, visit)
            await send_answer(send, 200, JSON, to_json(document), head=head)
        else:
            folder, _, file = path.removeprefix("/").partition("/")
            asset = self._asset(file) if folder == "page" and file != _assets.INDEX else None
            if asset is None:
                raise RequestRefused(404, "Not found", "There is nothing here.")
            expect(visit.method, "GET", "HEAD")
            await send_answer(send, 200, asset.kind, asset.body, head=head)

    async def _document(self, name: str, visit: Visit) -> dict[str, Any]:
        if name in _DOCUMENTS:
            document: dict[str, Any] = getattr(self, _DOCUMENTS[name])(visit)
            return document
        payloads = await self._authorization.operator(visit) is not None
        return await WORK_READS[name](
            visit.query, payloads=payloads, report=self._authorization.report
        )

    async def _page(self, visit: Visit, _receive: Receive, send: Send, *, head: bool) -> None:
        path: str = visit.scope["path"]
        if not path.endswith("/"):  # otherwise the page would look for its files beside the mount
            beside = f"./{quote(path.rpartition('/')[2])}/"
            where = [(b"location", beside.encode())]
            await send_answer(send, 307, b"text/plain", b"", more=where, head=head)
            return
        page = self._asset(_assets.INDEX)
        if page is None:
            raise RequestRefused(404, "Not found", "The files of the page are not installed.")
        body = _assets.index(page.body, self._scripts)
        await send_answer(send, 200, page.kind, body, head=head)

    async def _session(self, visit: Visit, _receive: Receive, send: Send, *, head: bool) -> None:
        operator = await self._authorization.operator(visit)
        token, more = ("", []) if operator is None else self._sessions.open(visit, operator)
        body = to_json({"operator": operator, "token": token})
        await send_answer(send, 200, JSON, body, more=more, head=head)

    async def _state(self, visit: Visit, _receive: Receive, send: Send, *, head: bool) -> None:
        operator = await self._authorization.operator(visit)
        sampler = self._sampler()
        try:
            async with asyncio.timeout(FIRST_WITHIN):
                frame = await sampler.first(await sampler.record_single_viewer())
        except TimeoutError:
            frame = sampler.broadcast.frame
        if frame is None:
            raise unavailable("There is nothing to show yet.")
        message = await frame.message(operator, sampler.history())
        await send_answer(send, 200, JSON, message, head=head)

    def _hours(self, visit: Visit) -> dict[str, Any]:
        spans = {str(int(step.span)): step for step in STEPS}
        step, guard = spans.get(visit.query.get("span", "")), visit.query.get("guard")
        if step is None or not guard:
            example = f"hours?guard=vendor&span={' or '.join(spans)}"
            raise RequestRefused(400, "Bad request", f"Name a guard and a span: {example}.")
        pods = self._sampler().hours(step.span, shown(guard, LONGEST_NAME))
        return {"guard": guard[:LONGEST_NAME], "step": step.seconds, "pods": pods}

    def _audit(self, visit: Visit) -> dict[str, Any]:
        from seawall.audit.outputs import as_table
        from seawall.audit.process import audit_process

        asked = {name: visit.query[name] for name in ("connections", "pods") if name in visit.query}
        try:
            findings = audit_process(**{name: int(number) for name, number in asked.items()})
        except ValueError as error:
            raise RequestRefused(400, "Bad request", str(error)[:500]) from error
        return {"findings": as_table(findings)}

    def _snapshot(self, _visit: Visit) -> dict[str, Any]:
        from seawall.tune.measurements import tuning_snapshot

        return tuning_snapshot()

    def _tune(self, visit: Visit) -> dict[str, Any]:
        """Return proposals that are not proven: a simulation takes too long for a page."""
        from seawall.tune.measurements import measurements_of, tuning_snapshot
        from seawall.tune.proposals import propose

        name, pod = visit.query.get("guard"), visit.query.get("pod")
        if not name:
            raise RequestRefused(400, "Bad request", "Name a guard: tune?guard=vendor.")
        here = self._shows_itself and pod in (None, self._sampler().watcher.pod)
        found = [propose(one) for one in measurements_of(tuning_snapshot(name) if here else {})]
        proposals = [
            {
                "place": proposal.place,
                "policy": proposal.policy,
                "words": shown(proposal.words, LONGEST_TEXT),
                "reason": shown(proposal.reason, LONGEST_TEXT),
            }
            for advice in found
            for proposal in advice.proposals
        ]
        return {"proposals": proposals}

    async def _events(self, visit: Visit, receive: Receive, send: Send, *, head: bool) -> None:
        if head:
            await send_answer(send, 200, b"text/event-stream; charset=utf-8", b"", head=True)
            return
        if len(self._viewers) >= self.max_viewers:
            raise unavailable(f"{self.max_viewers} look already.")
        sampler = self._sampler()

        async def ask() -> str | None:
            await self._authorization.admit(visit)
            return await self._authorization.operator(visit)

        sampler.end_with_server()
        stream = Stream(sampler.broadcast, send, ask, sampler.history, sampler.record_viewer())
        self._viewers.add(stream)
        try:
            await stream.run(receive, await self._authorization.operator(visit))
        finally:
            self._viewers.discard(stream)

    # Actions

    async def _posted(self, name: str, visit: Visit, receive: Receive) -> dict[str, Any]:
        operator = await self._authorization.operator(visit)
        if operator is None:
            raise forbidden("You may look, but not act.")
        self._sessions.check(visit, operator)
        body = await json_body(visit, receive)
        if name == "keys":
            return await answer_about_keys(body, operator, visit.client, self._authorization.report)
        if name == "work":
            return await act_on_work(body, operator, visit.client, self._authorization.report)
        if name != "act":
            try:
                return await self._post(name, body, operator)
            except ValueError as error:
                raise unprocessable(str(error)[:500]) from error
        asked = parse_action(body)
        sampler = self._sampler()
        view = sampler.watcher.sample()  # what is offered depends on the current state
        if asked.pod == view["pod"]["name"]:
            done = act_here(asked, view, operator, visit.client)
        else:
            if not self._acts_elsewhere:
                raise RequestRefused(409, "Conflict", NOT_FROM_HERE)
            done = await act_on_pod(asked, self._pods, self._authorization.report)
            log_action(asked, operator, visit.client)
        sampler.sample_soon()
        return {"done": done}


_READS: Final = {"": "_page", "events": "_events", "state": "_state", "session": "_session"}
"""The read routes by path, with the method that answers."""
_DOCUMENTS: Final = {"hours": "_hours", "audit": "_audit", "snapshot": "_snapshot", "tune": "_tune"}
"""The routes of plain JSON documents, with the method that returns them."""


def _end_all(*ended: Any) -> None:
    for one in ended:
        one.close()
