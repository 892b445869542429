"""Where a library is not installed, the error names the line that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest

MISSING = [
    ("redis", "redis", "from seawall import RedisStore; RedisStore('redis://localhost')"),
    (
        "nats",
        "nats",
        "from seawall.pipeline import JetStreamSink; JetStreamSink('nats://localhost', 'orders')",
    ),
    ("starlette", "web", "import seawall.web.fastapi"),
    ("django", "django", "import seawall.web.django"),
    ("litestar", "litestar", "import seawall.web.litestar"),
    ("quart", "quart", "import seawall.web.quart"),
    ("flask", "flask", "import seawall.web.flask"),
    ("httpx", "httpx", "import seawall.clients.httpx"),
    ("httpx2", "httpx2", "import seawall.clients.httpx2"),
    ("requests", "requests", "import seawall.clients.requests"),
    ("aiohttp", "aiohttp", "import seawall.clients.aiohttp"),
    ("aiohttp", "aiohttp", "import seawall.web.aiohttp"),
    ("botocore", "boto3", "import seawall.clients.boto3"),
    ("sqlalchemy", "sqlalchemy", "import seawall.clients.sqlalchemy"),
    ("celery", "celery", "import seawall.tasks.celery"),
    ("dramatiq", "dramatiq", "import seawall.tasks.dramatiq"),
    ("grpc", "grpc", "import seawall.clients.grpc"),
    ("grpc", "grpc", "import seawall.web.grpc"),
    ("grpc", "grpc", "from seawall.members import grpc_probe; grpc_probe('10.0.0.1:50051')"),
    ("prometheus_client", "prometheus", "from seawall.telemetry import export_prometheus"),
    (
        "cryptography",
        "cryptography",
        "from seawall.members import Keyring; Keyring('0' * 16, encrypt=True)",
    ),
    ("opentelemetry", "otel", "from seawall.telemetry import export_opentelemetry"),
]


@pytest.mark.parametrize(("library", "extra", "use"), MISSING)
def test_a_missing_library_is_told_with_the_line_that_installs_it(
    library: str, extra: str, use: str
):
    """In a process of its own, in which that library cannot be imported."""
    code = f"import sys\nsys.modules[{library!r}] = None\n{use}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)  # noqa: S603 - our own code
    said = ran.stderr.strip().splitlines()[-1].replace('"', "'")
    assert said.startswith("ImportError: ")
    assert said.endswith(f"pip install 'seawall[{extra}]'")
