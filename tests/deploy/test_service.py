"""The compose file's service and worker, started without Docker by the same commands."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from seawall.clock import SYSTEM
from tests.deploy.support import DEPLOY, ROOT, compose, dockerfile
from tests.durable.postgres import Postgres
from tests.redis.support import Server, eventually, free_port

yaml = pytest.importorskip("yaml")

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """Start the two servers; return where they are, by the names that the compose file uses."""
    valkey, postgres = Server(), Postgres()
    wanted = compose()["services"]["postgres"]["environment"]
    user, password = wanted["POSTGRES_USER"], wanted["POSTGRES_PASSWORD"]
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
        connection.execute(f"CREATE DATABASE {wanted['POSTGRES_DB']} OWNER {user}")
    yield {
        "valkey:6379": f"127.0.0.1:{valkey.port}",
        "postgres:5432": f"127.0.0.1:{postgres.port}",
    }
    postgres.close()
    valkey.close()


class Container:
    """A service of the compose file as a process, at a free port of this machine."""

    def __init__(self, name: str, addresses: dict[str, str], folder: Path) -> None:
        self.settings = compose()["services"][name]
        self.port, self.metrics_port = free_port(), free_port()
        (default,) = dockerfile("CMD")
        command = [self._here(part) for part in self.settings.get("command", json.loads(default))]
        image = dict(part.split("=") for env in dockerfile("ENV") for part in shlex.split(env))
        given = dict(self.settings["environment"])
        for name_of, value in given.items():
            for known, real in addresses.items():
                value = value.replace(known, real)  # noqa: PLW2901 - one name after the other
            given[name_of] = value
        own = {
            "UVICORN_HOST": "127.0.0.1",
            "UVICORN_PORT": str(self.port),
            "METRICS_PORT": str(self.metrics_port),
            "PYTHONPATH": str(ROOT / "src"),
        }
        self._log = folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(  # noqa: S603 - our own example
                [str(Path(sys.executable).parent / command[0]), *command[1:]],
                cwd=DEPLOY,
                env={**os.environ, **image, **given, **own},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _here(self, part: str) -> str:
        """Return a part of a command with this process's own port in place of the container's."""
        for port in ("8000", "8081"):
            part = part.replace(port, str(self.port))
        return part

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def answers(self) -> bool:
        """Ask for what its readiness, or at least its liveness, is known by."""
        assert self.process.poll() is None, self.log()
        try:
            return httpx.get(f"{self.url}/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def healthy(self) -> bool:
        """Run the health check of the compose file."""
        kind, _, *rest = self.settings["healthcheck"]["test"]
        assert kind == "CMD"
        check = [sys.executable, "-S", *map(self._here, rest)]
        return subprocess.run(check, capture_output=True, check=False).returncode == 0  # noqa: S603

    def stop(self) -> None:
        """Stop it as Docker does; it ends by itself, in order, within its grace period."""
        grace = float(self.settings["stop_grace_period"].removesuffix("s"))
        begun = SYSTEM.now()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(grace) == 0, self.log()
        assert SYSTEM.now() - begun < grace


@contextmanager
def started(name: str, addresses: dict[str, str], folder: Path) -> Iterator[Container]:
    """Start one, and see to it that it ends."""
    container = Container(name, addresses, folder)
    try:
        yield container
    finally:
        if container.process.poll() is None:
            container.process.kill()
            container.process.wait(10)


def probes(name: str) -> set[str]:
    """Return the paths that the probes of a Deployment ask for."""
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text("utf-8")
    (deployment,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return {value["httpGet"]["path"] for key, value in container.items() if key.endswith("Probe")}


def scraped(name: str) -> str:
    """Return the path that Prometheus is told to scrape."""
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text("utf-8")
    (deployment,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "Deployment")
    annotations: dict[str, str] = deployment["spec"]["template"]["metadata"]["annotations"]
    return annotations["prometheus.io/path"]


def test_the_service_and_its_worker_run_by_the_commands_of_the_compose_file(
    addresses: dict[str, str], tmp_path: Path
):
    """A report is ordered and made; probes and metrics answer; SIGTERM ends both in order."""
    with (
        started("service", addresses, tmp_path) as service,
        started("worker", addresses, tmp_path) as worker,
        httpx.Client(base_url=service.url, timeout=20.0) as client,
    ):
        for container in (service, worker):
            eventually(container.answers, seconds=60.0)
            assert container.healthy()
        assert probes("service") == {"/health/live", "/health/ready"}
        for path in probes("service"):
            assert client.get(path).status_code == 200
        for path in probes("worker"):
            assert httpx.get(worker.url + path).status_code == 200

        def states() -> dict[str, str]:
            checks = client.get("/health/deep").json()["checks"]
            return {name.partition(":")[0]: found[0]["status"] for name, found in checks.items()}

        well = {"database": "pass", "store": "pass"}
        eventually(lambda: states() == well, seconds=60.0)  # a busy machine may answer late

        ordered = client.post("/reports", json={"months": 6}, headers={"Idempotency-Key": '"a"'})
        assert ordered.status_code == 202, ordered.text
        place = ordered.headers["location"]

        def state() -> dict[str, Any]:
            found: dict[str, Any] = client.get(place, headers={"Prefer": "wait=5"}).json()
            return found

        eventually(lambda: state()["state"] == "succeeded", seconds=30.0)
        assert state()["result"] == {"pages": 12}
        assert client.post("/reports", json={"months": 0}).status_code == 422

        load = "seawall_autoscale_load "
        assert load in client.get(scraped("service")).text
        assert load in httpx.get(f"http://127.0.0.1:{worker.metrics_port}{scraped('worker')}").text

        service.stop()
        worker.stop()
        assert "stopped" in worker.log()
