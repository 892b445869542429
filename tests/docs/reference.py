"""The reference of the documentation, made from the code: docs/reference.

`./dev pin` and `./dev docs` write it, and the tests of the public API compare. It needs
nothing but Seawall itself.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import fields
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import seawall
from seawall import Rejected, errors, events, transient, wire
from seawall.runtime.policy import Policy
from seawall.telemetry.metrics import METRICS
from seawall.web.problems import problem_of
from seawall.wire.grpc import status_name

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
PINNED = ROOT / "tests" / "public_api.txt"

MADE = "<!-- Made from the code by ./dev pin. -->"
INDEX = """\
```python
import seawall

print(sorted(name for name in seawall.__all__ if name.startswith("Re")))
# > ['RedisStore', 'Rejected', 'Result', 'Retry', 'RetryBudget']
```

| page | what it lists |
| --- | --- |
| [Settings](settings.md) | the arguments of policies, edges, stores and workers, with defaults |
| [Errors](errors.md) | what Seawall raises, and how it is answered |
| [Events](events.md) | what `subscribe` reports |
| [Metrics](metrics.md) | what is exported to Prometheus and OpenTelemetry |
| [Headers](headers.md) | what crosses from one process to the next |
| [Extras](extras.md) | what can be installed with Seawall |

## API

Every public module, with all that it exports:
"""
ERRORS = """\
```python
from seawall import Bulkhead, BulkheadFull, Guard

vendor = Guard("vendor", Bulkhead(1))
with vendor.hold():
    try:
        vendor.call(str.upper, "hello")
    except BulkheadFull as error:
        print(error.reason, error.guard, error.policy)
# > bulkhead_full vendor bulkhead
```

What Seawall raises about a call is a `SeawallError`. A wrong setting is a `TypeError` or
`ValueError` where it is written. What your own function raises passes through as it is.

The last word of a meaning is the error's `reason`, a stable word for logs and metrics; a shedder
names its rule there, as in `shed_by_criticality`. *Retried* says whether `on=transient` retries it.
*HTTP* and *gRPC* are the statuses that a service behind an [edge](../web/edge.md) or an
[interceptor](../clients/grpc.md) answers with. A `RateLimited` of the caller's own
[request limit](../web/request-limits.md) is 429.
"""
NEVER_ATTEMPTED = """
## Never attempted

After a `Rejected` of the guard that you called (`error.guard` says which one it was) its function
was not started, in no attempt: if an attempt was made and only the next one refused, you get that
attempt's own error.
"""
ATTEMPTED = """
## The others

After any of these, something may have happened at the other side.
"""
EVENTS = """\
```python
from seawall import Breaker, Guard, subscribe
from seawall.events import BreakerChanged

seen = []
stop = subscribe(seen.append, BreakerChanged)
breaker = Breaker(consecutive=3)
vendor = Guard("vendor", breaker)
breaker.trip()
stop()
print(seen[0].name, seen[0].guard, seen[0].after)  # > breaker_changed vendor open
```

Every event has `guard`, the name of the guard or of whatever else it belongs to.
[Events](../operate/events.md) says when each one comes, and what its fields mean."""
EXTRAS = """\
```sh
pip install ".[fastapi,redis]"
```

The package itself needs nothing but the standard library. An extra brings the library that a part
of Seawall works with; where you have that library already, you need no extra.
"""
HEADERS = """\
```python
from seawall.wire.deadlines import read_timeout

print(read_timeout("grpc-timeout", "250m"))  # > 0.25
```

[Across processes](../web/wire.md) says who sends each header, and from which peers it is trusted.
"""
METRICS_OPENING = """\
```python
from seawall.telemetry import METRICS

print([metric.kind for metric in METRICS if metric.name == "seawall_attempts_total"])
# > ['counter']
```

[Telemetry](../operate/telemetry.md) says how to export them.
"""
SETTINGS = """\
```python
from seawall import Bulkhead, Guard

slots = Bulkhead(20)
vendor = Guard("vendor", slots)
slots.update(limit=30)  # at run time; state and calls in flight are kept
print(slots.limit)  # > 30
```

Every setting is checked where it is written: a wrong value raises, and says what to write instead.
`update(...)` of a policy takes those that can change at run time."""
CONFIGURED = {
    "A guard's stack at once": ("seawall.Guard.standard",),
    "At the edge": (
        "seawall.web.Edge",
        "seawall.web.wsgi.Edge",
        "seawall.web.LoopAdmission",
        "seawall.web.wsgi.QueueAdmission",
        "seawall.web.RequestLimit",
        "seawall.web.Trust",
        "seawall.web.Health",
        "seawall.web.Lifecycle",
    ),
    "Across pods": (
        "seawall.RedisStore",
        "seawall.redis.PriorityQueue",
        "seawall.jobs.Worker",
        "seawall.leases.Lease",
    ),
    "Effects that happen once": (
        "seawall.durable.Database",
        "seawall.durable.Idempotency",
        "seawall.durable.IdempotentRequests",
        "seawall.durable.Outbox",
        "seawall.durable.Dispatcher",
        "seawall.durable.Inbox",
        "seawall.durable.Jobs",
        "seawall.durable.JobWorker",
    ),
    "Resources": (
        "seawall.resources.Pool",
        "seawall.resources.Channel",
        "seawall.resources.IoPool",
        "seawall.resources.CpuPool",
    ),
    "Failure detection": (
        "seawall.members.Heartbeats",
        "seawall.members.Cluster",
        "seawall.members.Leader",
    ),
    "Seen from outside": ("seawall.dashboard.Dashboard",),
}
"""What is configured besides policies, by the heading under which it stands."""


def pages() -> dict[str, str]:
    """Return the text of each page by its path in docs/reference."""
    modules = re.findall(r"^# (seawall[\w.]*)$", PINNED.read_text("utf-8"), re.MULTILINE)
    return {
        "index.md": _page("Reference", INDEX, _modules(modules)),
        "errors.md": _page("Errors", ERRORS, _errors()),
        "events.md": _page("Events", EVENTS, _events()),
        "extras.md": _page("Extras", EXTRAS, _extras()),
        "headers.md": _page("Headers", HEADERS, _headers()),
        "metrics.md": _page("Metrics", METRICS_OPENING, _metrics()),
        "settings.md": _page("Settings", SETTINGS, _settings()),
        **{f"api/{name}.md": _page(name, f"::: {name}", ()) for name in modules},
    }


def stale() -> list[str]:
    """Return the pages that are not what the code says now."""
    made = pages()
    kept = {str(path.relative_to(REFERENCE)): path for path in REFERENCE.rglob("*.md")}
    return [
        name
        for name in sorted({*made, *kept})
        if name not in kept or kept[name].read_text("utf-8") != made.get(name)
    ]


def write() -> None:
    """Write the pages that are stale, and remove those of modules that are no longer public."""
    made = pages()
    for name in stale():
        path = REFERENCE / name
        if name in made:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[name], "utf-8")
        else:
            path.unlink()


def _page(title: str, opening: str, lines: Iterable[str]) -> str:
    return "\n".join([f"# {title}", "", MADE, "", opening, *lines]).rstrip() + "\n"


def _table(head: str, rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield head
    yield "|" + " --- |" * (head.count("|") - 1)
    for row in rows:
        cells = (" ".join(cell.split()) for cell in row)
        yield f"| {' | '.join(cells)} |"


def _first(thing: object) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def _code(text: str) -> str:
    """Return `text` as code of a table's cell. Renderers disagree about a bar between backticks."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{escape(text, quote=False).replace('|', '&#124;')}</code>"


def _modules(names: Iterable[str]) -> Iterator[str]:
    rows = ((f"[`{name}`](api/{name}.md)", _first_line(name)) for name in names)
    return _table("| module | what it has |", rows)


def _first_line(module: str) -> str:
    """Return the first line of a module's docstring, without importing what it needs."""
    path = ROOT / "src" / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").split("\n")[0]


def _errors() -> Iterator[str]:
    kinds = [getattr(errors, name) for name in errors.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type)]
    for opening, refused in ((NEVER_ATTEMPTED, True), (ATTEMPTED, False)):
        yield opening
        yield from _table(
            "| error | meaning | retried | HTTP | gRPC |",
            (_error(kind) for kind in kinds if issubclass(kind, Rejected) == refused),
        )


def _error(kind: type[errors.SeawallError]) -> list[str]:
    error = kind.__new__(kind)
    error.args = ("",)
    problem = problem_of(error)
    also = [base.__name__ for base in kind.__bases__ if base.__module__ == "builtins"]
    also = [f"Also a `{name}`." for name in also if name != "Exception"]
    return [
        f"`{kind.__name__}`",
        " ".join([_first(kind), *also, f"`{kind.reason}`"]),
        "yes" if transient(error) else "no",
        "500" if problem is None else str(problem.status),
        status_name(error),
    ]


def _events() -> Iterator[str]:
    for name in events.__all__:
        kind = getattr(events, name)
        if isinstance(kind, type) and kind is not events.Event:
            yield f"\n## {name}\n\n`{kind.name}`: {_first(kind)}\n"
            own = (field for field in fields(kind) if field.name != "guard")
            rows = ((f"`{field.name}`", _code(str(field.type))) for field in own)
            yield from _table("| field | type |", rows)


def _metrics() -> Iterator[str]:
    return _table(
        "| metric | kind | labels | meaning | read from |",
        (
            (
                f"`{metric.name}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.help,
                f"`{metric.source}`",
            )
            for metric in METRICS
        ),
    )


def _extras() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    rows = (
        (f"`{name}`", ", ".join(f"`{wanted}`" for wanted in listed))
        for name, listed in project["optional-dependencies"].items()
    )
    return _table("| extra | what it installs |", rows)


def _headers() -> Iterator[str]:
    return _table("| header or key | meaning |", _wire_names())


def _wire_names() -> Iterator[list[str]]:
    """Yield each public string constant of `seawall.wire`, and its docstring."""
    for module in pkgutil.iter_modules(wire.__path__):
        source = inspect.getsource(importlib.import_module(f"seawall.wire.{module.name}"))
        for node, after in pairwise(ast.parse(source).body):
            match node, after:
                case (
                    ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str(said))),
                    ast.Expr(value=ast.Constant(value=str(meaning))),
                ) if not name.startswith("_"):
                    yield [f"`{said}`", meaning]


def _settings() -> Iterator[str]:
    yield "\n## Policies"
    for name in seawall.__all__:
        kind = getattr(seawall, name)
        if isinstance(kind, type) and issubclass(kind, Policy) and kind is not Policy:
            yield from _configured(name, kind)
    for heading, paths in CONFIGURED.items():
        yield f"\n## {heading}"
        for path in paths:
            yield from _configured(path.removeprefix("seawall."), pkgutil.resolve_name(path))


def _configured(name: str, thing: Any) -> Iterator[str]:
    """Yield what a class, or a function that makes something, is for, and its arguments."""
    is_class = isinstance(thing, type)
    how = inspect.getdoc(thing.__init__ if is_class else thing) or ""
    yield f"\n### {name}\n"
    if is_class:
        yield f"{_first(thing)}\n"
    yield f"{' '.join(how.split())}\n"
    yield from _table("| setting | type | default |", _arguments(thing))


def _arguments(kind: Any) -> Iterator[list[str]]:
    for name, one in list(inspect.signature(kind).parameters.items()):
        stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        default = "required" if one.default is one.empty else f"`{_shown(one.default)}`"
        default = "none given" if stars else default
        yield [f"`{stars}{name}`", _code(_type(kind, one.annotation)), default]


def _type(kind: Any, annotation: str) -> str:
    """Return an annotation as it is written; if it stands for a few words, return these."""
    named = vars(sys.modules[kind.__module__]).get(annotation)
    if get_origin(named) is Literal:
        return " | ".join(map(repr, get_args(named)))
    return annotation


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return getattr(value, "__name__", None) or repr(value)


if __name__ == "__main__":
    write()
