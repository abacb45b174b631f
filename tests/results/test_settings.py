"""A setting is declared once: flag, help, hash, label and column follow from its field."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROOT, gcbench_each, invoke

from gcbench.results import declared
from gcbench.results.settings import ROLES, Settings
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
    small = ("--task", "quadratic", "--steps", "2", "--workers", "2", "--batch", "4")
    folder = tmp_path / "runs"
    described, ran, table, only = gcbench_each(
        ("run", "--help"),
        ("run", *small, "--results", folder, "--flavour", "0,3", "--json"),
        ("compare", folder),
        ("compare", folder, "--where", "flavour=3", "--json"),
        path=str(other),
    )
    assert "How sweet the mean is. Default: 0." in " ".join(described.out.split())
    plain, sweet = ran.json
    assert [one["config"]["flavour"] for one in ran.json] == [0, 3]
    assert plain["config_hash"] != sweet["config_hash"]
    before = invoke("run", *small, "--results", tmp_path / "before", "--json").json
    assert before["config_hash"] == plain["config_hash"], "the default changes no hash"
    assert "--flavour 3" in sweet["provenance"]["command"]
    assert "terngrad [flavour=3]" in table.out
    assert [row["method"] for row in only.json] == ["terngrad [flavour=3]"]


def test_the_config_has_the_declared_fields() -> None:
    assert Config.model_fields.keys() == Settings.model_fields.keys() == ROLES.keys()


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
