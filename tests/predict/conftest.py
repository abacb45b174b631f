"""Draws pictures only in tests of pictures: each takes longer than the prediction."""

import pytest


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch) -> None:
    if "picture" not in request.node.name:
        monkeypatch.setattr("gcbench.studies.draw", lambda analysis, path: None)
