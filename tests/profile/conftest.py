"""Draws pictures only in tests that look at them: they take longer than the analysis."""

import pytest

LOOKS = ("picture", "panel", "end_to_end")


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch) -> None:
    if not any(word in request.node.name for word in LOOKS):
        monkeypatch.setattr("gcbench.report.kinds.draw", lambda analysis, path: None)
