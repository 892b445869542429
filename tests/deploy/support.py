"""What the files of examples/deploy say."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
APP = DEPLOY / "app.py"


def compose() -> dict[str, Any]:
    """Return the compose file."""
    import yaml

    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    return read


def dockerfile(instruction: str) -> list[str]:
    """Return the arguments of each such instruction of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    return re.findall(rf"^{instruction} (.+)$", text, re.MULTILINE)


def drain_timeout() -> float:
    """Return DRAIN_TIMEOUT of the app, without running it."""
    (value,) = (
        node.value
        for node in ast.parse(APP.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "DRAIN_TIMEOUT"
    )
    return float(ast.literal_eval(value))
