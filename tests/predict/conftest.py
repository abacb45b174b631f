"""Leaves out what most tests do not look at and what takes longer than the prediction itself."""

import pytest

from gcbench.predict import validation


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch) -> None:
    """Draw only in tests of pictures."""
    if "picture" not in request.node.name:
        monkeypatch.setattr("gcbench.report.kinds.draw", lambda analysis, path: None)


@pytest.fixture(autouse=True)
def no_links(request: pytest.FixtureRequest, monkeypatch) -> None:
    """Search the links on which methods pay only in tests of `predict`, and of links."""
    if "test_advise" in request.node.nodeid and "links" not in request.node.name:
        monkeypatch.setattr(
            "gcbench.predict.prediction.Prepared.pays_fields", lambda *arguments: {}
        )


@pytest.fixture(autouse=True)
def narrow(request: pytest.FixtureRequest, monkeypatch) -> None:
    """Give methods the error band of uncompressed steps, except in tests of the band."""
    if "band" not in request.node.name:
        monkeypatch.setattr(validation.Bands, "of", lambda self, method: self.plain)
