"""TernGrad's Fig. 5: the fit finds known parameters, and the TernGrad bars are predicted."""

from __future__ import annotations

import statistics
from functools import partial

import _paper
import pytest
import terngrad_figure5
from commands import invoke

from gcbench.core import registry
from gcbench.predict import clusters, networks
from gcbench.report.analysis import load

PRESETS = {"gtx1080x4-1gbe": "1g", "p100x4-100g": "100g"}
"""Cluster preset -> the cluster's name in the figure."""


def test_the_shares_of_terngrad_are_those_of_the_paper() -> None:
    shares = {name: 1 / terngrad_figure5.paper_share(name) for name in terngrad_figure5.NETWORKS}
    expected = {"alexnet": 7.97, "googlenet-slim": 4.81, "vgg-a": 10.94}
    assert shares == pytest.approx(expected, rel=2e-3)
    signs = registry.compressor("signsgd")
    last = networks.network("vgg-a").last_share
    assert terngrad_figure5.share(signs, "twoshot", "vgg-a", 4) == pytest.approx(
        last + (1 - last) / 32, rel=1e-4
    )


def test_the_fit_finds_parameters_that_made_the_bars(monkeypatch) -> None:
    """Bars of known T, V and h come back exactly."""
    true_h, inside = {"alexnet": 0.5, "googlenet-slim": 1.0, "vgg-a": 1.0}, 0.3
    bars = {}
    for cluster, name in terngrad_figure5.PUBLISHED:
        rates = []
        for gpus in terngrad_figure5.GPUS:
            nodes = gpus // terngrad_figure5.NODE
            spent = (2 - 1 / nodes) * true_h[name] * terngrad_figure5.gbit(name) if nodes > 1 else 0
            rates.append(gpus * terngrad_figure5.NETWORKS[name] / (inside + spent))
        bars[cluster, name] = {"fp32": rates, "terngrad": rates}
    monkeypatch.setattr(terngrad_figure5, "PUBLISHED", bars)
    fitted = terngrad_figure5.fit("1g")
    assert fitted.needed == pytest.approx(true_h, abs=1e-8)
    assert fitted.volume == pytest.approx({n: 2 - 1 / n for n in terngrad_figure5.NODES}, rel=1e-8)
    assert fitted.error["alexnet"] < 1e-8


def test_figure_5_is_predicted(tmp_path) -> None:
    result = invoke(
        *("--results", tmp_path, "--json", "--compressor", "signsgd"),
        main=partial(_paper.main, terngrad_figure5),
    )
    tables = {table["name"]: table["rows"] for table in result.json["tables"]}
    bars = tables["bars"]
    assert len(bars) == 2 * 3 * 10 * 4

    def bar(method: str) -> dict:
        place = {"cluster": "1g", "network": "alexnet", "gpus": 8, "method": method}
        return next(row for row in bars if place.items() <= row.items())

    plain, tern = bar("fp32"), bar("TernGrad, 2 bits")
    assert tern["published"] / plain["published"] == pytest.approx(3.04, abs=0.01)
    assert tern["model"] / plain["model"] == pytest.approx(3.0, abs=0.05)
    assert tern["error"] == pytest.approx(tern["model"] / tern["published"] - 1)
    errors = {
        (method, where): [
            abs(row["error"])
            for row in bars
            if row["method"] == method and row["gpus"] >= 8 and row["cluster"].startswith(where)
        ]
        for method in (terngrad_figure5.TERNGRAD, terngrad_figure5.OWN)
        for where in ("", "1g")
    }
    for (method, where), median, largest in [
        ((terngrad_figure5.TERNGRAD, ""), 0.018, 0.098),
        ((terngrad_figure5.TERNGRAD, "1g"), 0.020, 0.098),
        ((terngrad_figure5.OWN, ""), 0.043, 0.43),
        ((terngrad_figure5.OWN, "1g"), 0.11, 0.43),
    ]:
        away = errors[method, where]
        assert len(away) == (21 if where else 42)
        assert statistics.median(away) == pytest.approx(median, rel=0.03)
        assert max(away) == pytest.approx(largest, rel=0.03)
    text = " ".join(result.json["conclusions"])
    assert "22 parameters are fitted to 48 bars of fp32, 12 bars" in text
    assert "the 21 of 1G Ethernet: median error 11 %, largest 43 % (VGG-A" in text
    for row in tables["fit"]:
        if row["parameter"].startswith("h "):
            assert abs(row["value"] - 0.5) < 0.025
    assert {row["published"] for row in bars if row["method"].startswith("signsgd")} == {None}
    folder = next(tmp_path.iterdir())
    assert (folder / "terngrad-figure5.png").stat().st_size > 20_000
    assert len(load(folder).table("panels").rows) == 18
    mine = {row["gpus"]: row["sent"] for row in bars if row["method"] == terngrad_figure5.OWN}
    assert (
        mine[512] > mine[8] > terngrad_figure5.paper_share("vgg-a")
    )  # sums of more nodes, more bits


@pytest.mark.parametrize("preset", PRESETS)
def test_the_links_of_the_paper_s_clusters_are_those_that_its_fp32_bars_need(preset) -> None:
    """Not the nominal 1 and 100 Gbit/s: a ring over these takes the median V of the fit."""
    cluster = clusters.load(preset)
    fitted = terngrad_figure5.effective_gbit(PRESETS[preset])
    assert cluster.inter.gbit == pytest.approx(fitted, rel=3e-3)
    volume = terngrad_figure5.fit(PRESETS[preset]).volume
    nodes = cluster.model_copy(update={"gpus_per_node": 1})
    ring = {n: nodes.seconds("allreduce", 1e9 / 8, n) for n in terngrad_figure5.NODES}
    away = [ring[n] / volume[n] - 1 for n in terngrad_figure5.NODES]
    assert statistics.median(away) == pytest.approx(0, abs=5e-3)
