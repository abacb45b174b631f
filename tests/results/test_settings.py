"""A setting is declared once: flag, help, hash, label and column follow from its field."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, gcbench

from gcbench.results import declared
from gcbench.results.settings import DECLARED, Settings
from gcbench.training.configuration import Config

FIELD = """    flavour: NotNegative = setting(
        0, "How sweet the mean is.", COMPARED, "method", changes_fp32=True
    )
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Return a checkout in which one file differs: the settings have one more field."""
    for name in ("compressors", "tasks", "cuda"):
        (tmp_path / name).symlink_to(ROOT / name)
    for room in (ROOT / "gcbench").iterdir():
        if room.name != "results":
            place = tmp_path / "gcbench" / room.name
            place.parent.mkdir(exist_ok=True)
            place.symlink_to(room)
    (tmp_path / "gcbench" / "results").mkdir()
    for path in (ROOT / "gcbench" / "results").glob("*.py"):
        text = path.read_text()
        if path.name == "settings.py":
            text = text.replace("    dense_last: Flag", f"{FIELD}    dense_last: Flag", 1)
            assert FIELD in text
        (tmp_path / "gcbench" / "results" / path.name).write_text(text)
    return tmp_path


def test_a_new_setting_touches_one_file(other: Path, tmp_path: Path) -> None:
    def invoke(*words: str) -> str:
        command = [sys.executable, "-m", "gcbench", *words]
        environment = {**os.environ, "PYTHONPATH": str(other)}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=other, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "How sweet the mean is. Default: 0." in " ".join(invoke("run", "--help").split())
    small = ("--task", "quadratic", "--steps", "2", "--workers", "2", "--batch", "4")
    runs = ("--results", str(tmp_path / "runs"))
    config = json.loads(invoke("run", *small, *runs, "--flavour", "0,3", "--json"))
    plain, sweet = config
    assert [one["config"]["flavour"] for one in config] == [0, 3]
    assert plain["config_hash"] != sweet["config_hash"]
    before = gcbench("run", *small, "--results", tmp_path / "before", "--json").json
    assert before["config_hash"] == plain["config_hash"], "the default changes no hash"
    assert "--flavour 3" in sweet["provenance"]["command"]
    table = invoke("compare", str(tmp_path / "runs"))
    assert "terngrad [flavour=3]" in table
    only = json.loads(invoke("compare", str(tmp_path / "runs"), "--where", "flavour=3", "--json"))
    assert [row["method"] for row in only] == ["terngrad [flavour=3]"]


def test_the_config_has_the_declared_fields() -> None:
    assert Config.model_fields.keys() == Settings.model_fields.keys() == DECLARED.roles.keys()


def test_literal_declarations_are_those_of_the_classes() -> None:
    from gcbench.core import registry

    for name in registry.compressors():
        method = registry.compressor(name)
        result = declared.of_method({"compressor": name})
        assert result is not None
        assert (result.memory, result.memory_options) == (method.memory, method.memory_options)
        assert result.recipe == method.recipe
    for name in registry.memories():
        assert declared.has_momentum(name) == registry.memory_class(name).has_momentum
