"""The files of examples/deploy: valid by schema, and in agreement with the app and each other."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from seawall.telemetry.metrics import BY_NAME
from seawall.telemetry.thresholds import LOAD_WARN
from tests.deploy.support import APP, DEPLOY, ROOT, compose, dockerfile, drain_timeout

yaml = pytest.importorskip("yaml")
jsonschema = pytest.importorskip("jsonschema")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OURS = ("service", "worker", "hpa")

TEXT = {"type": "string", "minLength": 1}
SECONDS = {"type": "string", "pattern": "^[1-9][0-9]*s$"}
COMMAND = {"type": "array", "items": {"type": "string"}, "minItems": 1}

SERVICE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "build": {
            "type": "object",
            "additionalProperties": False,
            "required": ["context", "dockerfile"],
            "properties": {"context": TEXT, "dockerfile": TEXT},
        },
        "image": TEXT,
        "command": COMMAND,
        "environment": {"type": "object", "additionalProperties": {"type": "string"}},
        "ports": {"type": "array", "items": {"type": "string", "pattern": r"^[0-9.]+:\d+:\d+$"}},
        "volumes": {"type": "array", "items": TEXT},
        "restart": {"enum": ["no", "always", "on-failure", "unless-stopped"]},
        "stop_grace_period": SECONDS,
        "depends_on": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "additionalProperties": False,
                "required": ["condition"],
                "properties": {"condition": {"const": "service_healthy"}},
            },
        },
        "healthcheck": {
            "type": "object",
            "additionalProperties": False,
            "required": ["test", "interval", "timeout", "retries"],
            "properties": {
                "test": COMMAND,
                "interval": SECONDS,
                "timeout": SECONDS,
                "start_period": SECONDS,
                "retries": {"type": "integer", "minimum": 1},
            },
        },
    },
    "required": ["image", "healthcheck"],
}
COMPOSE = {
    "type": "object",
    "additionalProperties": False,
    "patternProperties": {"^x-": {}},
    "required": ["name", "services"],
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z0-9][a-z0-9_-]*$"},
        "services": {"type": "object", "additionalProperties": SERVICE},
        "volumes": {"type": "object"},
    },
}
"""The part of the compose specification that is used here."""

COUNT = {"type": "integer", "minimum": 0}
SCALED_OBJECT = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "keda.sh/v1alpha1"},
        "kind": {"const": "ScaledObject"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["scaleTargetRef", "triggers"],
            "properties": {
                "scaleTargetRef": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["name"],
                    "properties": {"apiVersion": TEXT, "kind": TEXT, "name": TEXT},
                },
                "minReplicaCount": COUNT,
                "maxReplicaCount": COUNT,
                "pollingInterval": COUNT,
                "cooldownPeriod": COUNT,
                "fallback": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["failureThreshold", "replicas"],
                    "properties": {"failureThreshold": COUNT, "replicas": COUNT},
                },
                "triggers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["type", "metadata"],
                        "properties": {
                            "type": {"const": "prometheus"},
                            "name": TEXT,
                            "metricType": {"enum": ["AverageValue", "Value"]},
                            "metadata": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["serverAddress", "query", "threshold"],
                                # All of a trigger's metadata is text.
                                "properties": dict.fromkeys(
                                    (
                                        "serverAddress",
                                        "query",
                                        "threshold",
                                        "activationThreshold",
                                        "ignoreNullValues",
                                    ),
                                    TEXT,
                                ),
                            },
                        },
                    },
                },
            },
        },
    },
}
"""The fields of KEDA's ScaledObject that its documentation names, as far as they are used."""


def documents(name: str) -> list[dict[str, Any]]:
    """Return the documents of a manifest."""
    text = (DEPLOY / "kubernetes" / f"{name}.yaml").read_text("utf-8")
    return [one for one in yaml.safe_load_all(text) if one]


def of_kind(name: str, kind: str) -> dict[str, Any]:
    """Return the only one of that kind."""
    (found,) = (one for one in documents(name) if one["kind"] == kind)
    return found


def pod_of(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the pod's specification, and its container."""
    spec = of_kind(name, "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def ports_of(container: dict[str, Any]) -> dict[str, int]:
    """Return the container's ports by name."""
    return {port["name"]: port["containerPort"] for port in container["ports"]}


# Schemas


@pytest.mark.parametrize("name", OURS)
def test_manifests_are_what_kubernetes_takes(name: str):
    """No field is unknown, misplaced or of the wrong type."""
    for one in documents(name):
        kubernetes_validate.validate(one, "1.33", strict=True)


@pytest.mark.parametrize("field", ["terminationGracePeriodSecond", "replica"])
def test_a_misspelt_field_is_found(field: str):
    """The validation can fail: a field that nobody knows is refused."""
    wrong = of_kind("service", "Deployment")
    wrong["spec"]["template"]["spec"][field] = 35
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.33", strict=True)


def test_the_scaled_object_is_what_keda_takes():
    """KEDA's resource is no part of Kubernetes: its fields are in a schema here."""
    (one,) = documents("keda")
    jsonschema.validate(one, SCALED_OBJECT)
    one["spec"]["triggers"][0]["metadata"]["threshold"] = 0.7  # a number is refused by KEDA
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(one, SCALED_OBJECT)


def test_the_compose_file_is_valid():
    """Each key is known, and has the right form; what a service depends on has a health check."""
    file = compose()
    jsonschema.validate(file, COMPOSE)
    for service in file["services"].values():
        for name in service.get("depends_on", {}):
            assert "healthcheck" in file["services"][name]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in file["volumes"]
    file["services"]["worker"]["stop_grace"] = "30s"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file, COMPOSE)


def test_every_manifest_is_tested():
    """A file that is added has its place in these tests."""
    assert {path.stem for path in MANIFESTS} == {*OURS, "keda", "prometheus-adapter"}


# The image


def test_the_dockerfile_copies_what_is_there_and_installs_extras_that_exist():
    """Its sources exist and are not ignored; the extras are the package's own."""
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    for source in dockerfile("COPY"):
        for part in source.split()[:-1]:
            assert (ROOT / part).exists()
            assert f"!{part}" in kept
    (installed,) = (run for run in dockerfile("RUN") if "pip install" in run)
    extras = re.search(r"/build\[([\w,]+)\]", installed)
    assert extras is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(extras[1].split(",")) <= set(known["project"]["optional-dependencies"])


def test_the_copied_files_are_enough_to_build_the_package(tmp_path: Path):
    """The step that installs it does not miss a file of the project that the image has not."""
    for copied in dockerfile("COPY"):
        *sources, target = copied.split()
        if not target.startswith("/build/"):
            continue
        for source in sources:
            place = tmp_path / target.removeprefix("/build/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, dirs_exist_ok=True)
            else:
                shutil.copy(ROOT / source, place)
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    offline = ["--no-build-isolation", "--no-index", "-w", str(tmp_path / "made")]
    built = subprocess.run(  # noqa: S603 - the project's own package
        [*pip, *offline, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (wheel,) = (tmp_path / "made").glob("seawall-*.whl")
    assert "seawall/web/fastapi.py" in ZipFile(wheel).namelist()


def test_the_process_gets_its_signals_and_is_not_root():
    """CMD is without a shell, and the user is a number other than 0."""
    (command,) = dockerfile("CMD")
    assert json.loads(command) == ["uvicorn", "app:app"]
    (user,) = dockerfile("USER")
    assert int(user) > 0
    for name in ("service", "worker"):
        assert pod_of(name)[0]["securityContext"]["runAsNonRoot"] is True


# Agreement


def test_ports_agree():
    """The app's port is the same in the image, the compose file, the pod, probes and scrapes."""
    (exposed,) = dockerfile("EXPOSE")
    settings = dict(part.split("=") for env in dockerfile("ENV") for part in shlex.split(env))
    assert settings["UVICORN_PORT"] == exposed
    service = compose()["services"]["service"]
    (published,) = service["ports"]
    assert published.split(":")[-1] == exposed
    assert f"127.0.0.1:{exposed}/" in service["healthcheck"]["test"][-1]
    _, container = pod_of("service")
    assert ports_of(container) == {"http": int(exposed)}
    (port,) = of_kind("service", "Service")["spec"]["ports"]
    assert port["targetPort"] == "http"
    template = of_kind("service", "Deployment")["spec"]["template"]
    assert template["metadata"]["annotations"]["prometheus.io/port"] == exposed

    _, worker = pod_of("worker")
    told = worker["command"][worker["command"].index("--health") + 1]
    assert told == f"0.0.0.0:{ports_of(worker)['health']}"  # the kubelet is another machine
    template = of_kind("worker", "Deployment")["spec"]["template"]
    scraped = template["metadata"]["annotations"]["prometheus.io/port"]
    assert scraped == str(ports_of(worker)["metrics"])
    assert {"name": "METRICS_PORT", "value": scraped} in worker["env"]
    by_compose = compose()["services"]["worker"]
    (health,) = (part for part in by_compose["command"] if part.isdigit() and len(part) == 4)
    assert f"127.0.0.1:{health}/" in by_compose["healthcheck"]["test"][-1]


def test_probes_have_ports_and_enough_time():
    """Each names a port of its container, and waits longer than a check may take."""
    from seawall.web.health.health import TIMEOUTS

    for name, probes in (
        ("service", ["startupProbe", "livenessProbe", "readinessProbe"]),
        ("worker", ["startupProbe", "livenessProbe"]),
    ):
        _, container = pod_of(name)
        assert [key for key in container if key.endswith("Probe")] == probes
        for probe in probes:
            assert container[probe]["httpGet"]["port"] in ports_of(container)
    _, container = pod_of("service")
    assert container["readinessProbe"]["timeoutSeconds"] > TIMEOUTS["ready"]
    assert container["livenessProbe"]["timeoutSeconds"] > TIMEOUTS["live"]


def test_grace_periods_are_longer_than_draining():
    """What is killed has had the time that it was promised: preStop and draining fit."""
    spec, container = pod_of("service")
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > waits + drain_timeout()
    (delay,) = (float(one["value"]) for one in container["env"] if one["name"] == "DRAIN_DELAY")
    assert 0 < delay < drain_timeout()
    services = compose()["services"]
    assert seconds(services["service"]["stop_grace_period"]) > drain_timeout()

    spec, container = pod_of("worker")
    assert spec["terminationGracePeriodSeconds"] >= drain_of(container["command"]) + 5
    worker = services["worker"]
    assert seconds(worker["stop_grace_period"]) >= drain_of(worker["command"]) + 5


def seconds(text: str) -> int:
    return int(text.removesuffix("s"))


def drain_of(command: list[str]) -> int:
    return int(command[command.index("--drain") + 1])


def test_variables_are_those_that_the_app_reads():
    """What is set is read, and what must be set is set."""
    source = APP.read_text("utf-8")
    needed = set(re.findall(r'environ\["(\w+)"\]', source))
    optional = set(re.findall(r'environ\.get\("(\w+)"', source))
    for name in ("service", "worker"):
        _, container = pod_of(name)
        given = {one["name"] for one in container["env"]}
        assert needed <= given <= needed | optional
        assert set(compose()["services"][name]["environment"]) == needed


def test_selectors_and_targets_agree():
    """Labels lead to the pods, budgets allow a disruption, and autoscalers name the Deployments."""
    for name in ("service", "worker"):
        deployment = of_kind(name, "Deployment")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert deployment["spec"]["selector"]["matchLabels"] == labels
        budget = of_kind(name, "PodDisruptionBudget")["spec"]
        assert budget["selector"]["matchLabels"] == labels
        assert budget["maxUnavailable"] == 1
        assert "replicas" not in deployment["spec"]
    assert of_kind("service", "Service")["spec"]["selector"] == labels_of("service")
    hpa = of_kind("hpa", "HorizontalPodAutoscaler")["spec"]
    assert hpa["scaleTargetRef"]["name"] == of_kind("service", "Deployment")["metadata"]["name"]
    (keda,) = documents("keda")
    target = keda["spec"]["scaleTargetRef"]["name"]
    assert target == of_kind("worker", "Deployment")["metadata"]["name"]
    least, most = keda["spec"]["minReplicaCount"], keda["spec"]["maxReplicaCount"]
    assert least <= keda["spec"]["fallback"]["replicas"] <= most
    assert hpa["minReplicas"] >= 2  # a pod may be drained while the other serves


def labels_of(name: str) -> dict[str, str]:
    labels: dict[str, str] = of_kind(name, "Deployment")["spec"]["template"]["metadata"]["labels"]
    return labels


def test_autoscalers_want_as_many_pods_as_the_page_says():
    """Both come to pods x mean / 0.7, by a metric that is there, with the target of the warning."""
    (trigger,) = documents("keda")[0]["spec"]["triggers"]
    (metric,) = of_kind("hpa", "HorizontalPodAutoscaler")["spec"]["metrics"]
    assert "seawall_autoscale_load" in BY_NAME
    query = 'sum(seawall_autoscale_load{job="reports-worker"})'
    assert trigger["metadata"]["query"] == query
    assert trigger["metricType"] == metric["pods"]["target"]["type"] == "AverageValue"
    assert float(trigger["metadata"]["threshold"]) == LOAD_WARN
    assert metric["pods"]["metric"]["name"] == "seawall_autoscale_load"
    assert metric["pods"]["target"]["averageValue"] == f"{LOAD_WARN * 1000:g}m"
    (rule,) = documents("prometheus-adapter")[0]["rules"]
    assert rule["seriesQuery"].startswith("seawall_autoscale_load{")
