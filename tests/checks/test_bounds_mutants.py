"""`gcbench bounds --strict` finds wrong methods, and passes the right ones.

The wrong ones are of `wrong_methods`, installed as a third party's; each goes through the command.
The seeds are fixed; of a right method a theorem row fails with probability 1e-6 at most.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import invoke
from wrong_methods import EFSIGN, QSGD, TERN, WRONG, Levels, Wrong

from gcbench.checks import bounds, calls
from gcbench.checks.bounds import (
    audit,
    codec_claims,
    quadratic_claims,
    quadratics,
    training,
)
from gcbench.checks.bounds.claims import Judged, MethodVerdicts
from gcbench.core.compressor import Segments

QUICK = ("--quadratic-only", "--seed", 0, "--strict")


@pytest.fixture
def installed(tmp_path, third_party):
    """The wrong methods as pip would leave them."""
    info = tmp_path / "site" / "wrong-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    points = "\n".join(
        f"{name} = wrong_methods:{wrong.method.__name__}" for name, wrong in WRONG.items()
    )
    points += "\ntwoshotlevels = wrong_methods:TwoShotLevels\ndither = wrong_methods:Dither"
    (info / "entry_points.txt").write_text(f"[gcbench.compressors]\n{points}\n")
    third_party(str(info.parent))


@pytest.fixture
def small(monkeypatch):
    """Fewer copies and votes: what is wrong here is far beyond any bound."""
    monkeypatch.setattr(quadratics, "ELEMENTS", 512)
    monkeypatch.setattr(quadratics, "PLATEAU_ELEMENTS", 1024)
    monkeypatch.setattr(codec_claims, "VOTES", 20_000)


def failed(word: str, wrong: Wrong, folder: Path) -> tuple[int, set[str]]:
    """Return the exit code of the command, and the groups of theorems that failed."""
    claims = f"{wrong.claims}/{word}"
    words = (*QUICK, "--methods", word, "--claims", claims, "--results", folder)
    done = invoke("bounds", *words, "--json")
    rows = json.loads(done.out)["tables"][0]["rows"]
    assert all(row["ran"] == word for row in rows)
    theorems = [row for row in rows if row["kind"] == "theorem" and row["verdict"] == "fails"]
    return done.code, {str(row["claim"]).partition("/")[0] for row in theorems}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_method_is_caught(name: str, installed, small, tmp_path) -> None:
    wrong = WRONG[name]
    code, fails = failed(name + wrong.options, wrong, tmp_path / "r")
    assert code == 1
    assert set(wrong.caught) <= fails, f"{wrong.method.__name__}: caught by {fails}"


def test_every_theorem_check_catches_something() -> None:
    """Each claim of kind theorem that judges methods is one by which a wrong method must fail."""
    claims = (*codec_claims.OF_METHODS, *quadratic_claims.OF_METHODS)
    theorems = {claim.name for claim in claims if claim.kind == "theorem"}
    assert theorems == {group for wrong in WRONG.values() for group in wrong.caught}


def test_right_methods_pass_every_check(small, tmp_path, monkeypatch) -> None:
    """All registered methods and the published forms, with one seed and short descents."""
    monkeypatch.setattr(quadratics, "ELEMENTS", 256)
    monkeypatch.setattr(quadratics, "PLATEAU_ELEMENTS", 512)
    monkeypatch.setattr(quadratics, "LEAST", 8)
    monkeypatch.setattr(codec_claims, "LEAST", 24)
    monkeypatch.setattr(codec_claims, "MOST", 60)
    monkeypatch.setattr(quadratics, "RATE_STEPS", 100)
    monkeypatch.setattr(quadratics, "FLOOR_STEPS", 60)
    runs = quadratic_claims.SIGN_RUNS.items()
    short = {which: tuple(replace(run, k=run.k // 4) for run in each) for which, each in runs}
    monkeypatch.setattr(quadratic_claims, "SIGN_RUNS", short)
    done = invoke("bounds", *QUICK, "--results", tmp_path, "--json")
    rows = json.loads(done.out)["tables"][0]["rows"]
    fails = [
        (row["claim"], row["setting"], row["ratio"]) for row in rows if row["verdict"] == "fails"
    ]
    assert not fails
    assert done.code == 0
    judged = {str(row["claim"]).partition("/")[0] for row in rows}
    claims = (*codec_claims.OF_METHODS, *quadratic_claims.OF_METHODS)
    theorems = {claim.name for claim in claims if claim.kind == "theorem"}
    assert judged == theorems - {"contract"}  # which has rows where it fails alone


class ResidualTern(TERN):
    """Unbiased for what it is offered, which is more than the gradient."""

    memory = "residual"


@pytest.mark.parametrize(
    ("base", "collectives", "why"),
    [
        (Levels, ("twoshot",), "two-shot alone"),
        (EFSIGN, ("twoshot",), "two-shot alone"),
        (ResidualTern, ("allgather",), "it sends its residual, too"),
    ],
)
def test_what_no_audit_sees_is_not_judged(base, collectives, why, small) -> None:
    """Right methods whose declared error is not that of what arrives: no row, but a reason."""
    method = type("Right", (base,), {"collectives": collectives})()
    judged = Judged(lambda _: True)
    work = (codec_claims.units, quadratic_claims.units)
    for unit in (unit for units in work for unit in units({"right": method}, (0,))):
        unit.judge(MethodVerdicts(judged, unit.word, unit.place))
    skipped = {group for group, _, reasons in judged.absent if why in reasons}
    assert not [row["claim"] for row in judged.rows if row["verdict"] == "fails"]
    if method.claims.unbiased:
        assert {"unbiased", "variance", "variance-bound"} <= skipped
    else:
        assert {"contraction", "error-bound", "identity", "descent", "biased-descent"} <= skipped


def test_a_command_that_judges_nothing_says_why(installed, small, tmp_path) -> None:
    """A method that no theorem judges, whatever its code does, does not pass --strict."""
    words = ("bounds", *QUICK, "--methods", "none,twoshotlevels", "--results", tmp_path)
    done = invoke(*words, "--details")
    messages = " ".join(done.out.split())
    assert "owners encode the mean again" in messages
    assert "No theorem applies to twoshotlevels: " in messages
    assert done.code == 1
    assert "no theorem judged twoshotlevels; gcbench verify" in done.err
    again = invoke(*words)
    assert (again.code, "is finished" in again.err) == (1, True)
    assert invoke(*(word for word in words if word != "--strict")).code == 0


def test_a_method_whose_first_two_steps_draw_alike_is_random() -> None:
    class Paired(QSGD):
        def encode(self, x, ctx):
            return super().encode(x, ctx._replace(key=ctx.key._replace(step=ctx.key.step // 2)))

    segments = Segments.of([(100,)])
    assert calls.is_random(Paired(), torch.arange(100.0), segments)
    assert not calls.is_random(TERN(), torch.zeros(100), segments)


def test_a_right_method_of_no_levels_is_judged(installed, small, tmp_path) -> None:
    """Subtractive dither: the error of an element near 0 is as large as that of any other."""
    words = ("bounds", *QUICK, "--methods", "dither", "--results", tmp_path, "--json")
    done = invoke(*words)
    rows = [row for row in json.loads(done.out)["tables"][0]["rows"] if row["kind"] == "theorem"]
    verdicts = {(str(row["claim"]).partition("/")[0], row["verdict"]) for row in rows}
    assert {("unbiased", "holds"), ("variance", "holds")} <= verdicts
    assert done.code == 0


def test_a_right_method_of_no_levels_is_judged_where_gradients_are_zero(installed, tmp_path):
    """Subtractive dither in training: zeros have an error, too, where V / |t| is not a bound."""
    words = ("bounds", "--task", "digits", "--methods", "dither", "--claims", "[uv]*/dither")
    quick = ("--steps", 4, "--compressed-steps", 8, "--batches", 8, "--snapshots", 1, "--seed", 0)
    done = invoke(*words, *quick, "--strict", "--results", tmp_path, "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["tables"][0]["rows"]
    trained = {row["claim"]: row for row in rows if row["place"] == "training of digits"}
    assert trained.keys() == {"unbiased/dither", "variance/dither"}
    assert all(row["high"] < 1000 for row in trained.values()), "intervals that say something"


def test_a_class_derived_from_ours_fails_while_it_trains(installed, tmp_path) -> None:
    """Half of the signs flipped at random, as what trains: no method needs to be named."""
    words = ("bounds", "--task", "digits", "--compressor", "flipped", "--strict", "--json")
    quick = ("--steps", 6, "--compressed-steps", 4, "--batches", 8, "--snapshots", 1)
    only = ("--methods", "none", "--claims", "sign/*", "--seed", 0, "--results", tmp_path)
    done = invoke(*words, *quick, *only)
    assert done.code == 1
    document = json.loads(done.out)
    assert document["failed"]
    (result,) = (
        row
        for row in document["tables"][0]["rows"]
        if row["claim"] == "sign/flipped" and row["place"] == "training of digits"
    )
    assert (result["verdict"], result["setting"]) == ("fails", "4 steps, M=4")
    assert any("sign/flipped" in sentence for sentence in document["conclusions"])


@pytest.mark.parametrize("name", ["droppingtern", "negatedsigns", "negatedtopk", "flipped"])
def test_wrong_methods_are_caught_in_training_alone(name: str, installed, tmp_path) -> None:
    """20 steps of compressed training, with each of three seeds."""
    settings = bounds.make(methods=name, seeds=(0, 1, 2), steps=1)
    base, method = settings.config(0), settings.chosen()[name]
    records = [
        training.train(
            base.model_copy(update={"seed": seed}), name, method, 20, tmp_path, None, lambda _: None
        )
        for seed in settings.seeds
    ]
    judged = Judged(lambda _: True)
    verdicts = MethodVerdicts(judged, name, "training")
    codec_claims.judge(audit.merged(records), verdicts, "60 steps")
    assert any(row["verdict"] == "fails" for row in judged.rows)
