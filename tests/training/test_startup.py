"""Packages that a run and a prediction do not import: they take as long as torch, for nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib import util

import torch
from sklearn.datasets import load_digits

from gcbench.core import registry
from gcbench.training.engines import without_compiler

TRAIN = """
import sys, gcbench
for optimizer in ("sgd", "adam"):
    gcbench.run(task="digits", optimizer=optimizer, steps=2, workers=2, results=sys.argv[1])
from gcbench.predict import networks
networks.network("resnet50")
print(sorted({"torch._dynamo", "sklearn", "sympy", "matplotlib"} & set(sys.modules)))
"""


def test_no_compiler_and_no_scikit_learn_is_imported(tmp_path):
    words = [sys.executable, "-c", TRAIN, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_optimizers_are_as_before_afterwards():
    """Marked inside alone: who compiles a training step later is left out as torch has it."""

    def marked() -> list[str]:
        methods = vars(torch.optim.Optimizer).items()
        return [
            name
            for name, method in methods
            if getattr(getattr(method, "__wrapped__", None), "__dynamo_disable", None)
            is getattr(method, "__wrapped__", method)
        ]

    before = marked()
    for name in ("add_param_group", "zero_grad", "state_dict"):
        plain = getattr(torch.optim.Optimizer, name).__wrapped__
        plain.__dict__.pop("__dynamo_disable", None)
    with without_compiler():
        assert {"add_param_group", "zero_grad", "state_dict"} <= set(marked())
    assert set(marked()) <= set(before)


def test_the_digits_are_scikit_learns_wherever_their_file_lies(monkeypatch):
    pixels, labels = both = load_digits(return_X_y=True)

    def check() -> None:
        train, test = registry.task("digits").load(None)
        assert torch.equal(test.inputs.flatten(1), torch.from_numpy(pixels[::5]).to(torch.uint8))
        assert torch.equal(test.targets, torch.from_numpy(labels[::5]))
        assert len(train.targets) + len(test.targets) == len(labels) == 1797

    check()
    there = util.find_spec("sklearn")
    assert there is not None
    monkeypatch.setattr(there, "submodule_search_locations", ["/nowhere"])
    monkeypatch.setattr("gcbench.tasks.digits.find_spec", lambda name: there)
    asked = []
    monkeypatch.setattr("sklearn.datasets.load_digits", lambda **how: asked.append(how) or both)
    check()
    assert asked == [{"return_X_y": True}]
