"""Workers with different runs all end with an error before the first step."""

from __future__ import annotations

import re
import shlex
import time

import crew
import pytest
from commands import PATIENCE

from gcbench.training import launch

pytestmark = pytest.mark.usefixtures("forked")

SAID = {
    "version": "version of gcbench: 0.1.0 on worker(s) 0, 2, 0.0.9 on worker(s) 1",
    "clip": 'setting options: {} on worker(s) 0, 2, {"clip": 2.0} on worker(s) 1',
    "lr": "setting lr: 0.1 on worker(s) 0, 2, 0.5 on worker(s) 1",
    "data": "data: ",
}


def test_three_processes_name_all_that_differs_on_every_rank():
    message = launch.in_processes(3, 1, crew.agree, tuple(SAID))
    assert len(set(message)) == 1
    for part in SAID.values():
        assert part in message[0]
    assert "compressor: [" in message[0], "the fields that were not given count, too"
    assert re.search(r"data: [0-9a-f]{64} on worker\(s\) 0, 2, [0-9a-f]{64} on worker", message[0])
    assert "setting task" not in message[0]


def test_three_processes_that_are_alike_agree():
    assert launch.in_processes(3, 1, crew.agree, ()) == ["agreed"] * 3


OTHER = """
import os, sys
if os.environ.get("RANK") == "1" and "--lr" in sys.argv:
    sys.argv[sys.argv.index("--lr") + 1] = "0.5"
"""


def test_torchrun_workers_of_other_commands_end_within_seconds(programs, tmp_path):
    """Worker 1 is started with another rate, as on a machine whose script is older."""
    (tmp_path / "other.py").write_text(
        OTHER + "import runpy\nrunpy.run_module('gcbench', run_name='__main__')\n"
    )
    words = ("run", "--task", "quadratic", "--workers", 2, "--steps", 10**6, "--lr", "0.1")
    words = (*words, "--results", tmp_path / "r", "--progress", "none")
    job = ("torchrun", "--standalone", "--nproc-per-node", 2, tmp_path / "other.py", *words)
    began = time.monotonic()
    environment = {"OMP_NUM_THREADS": "1", launch.TIMEOUT: "240"}
    done = programs.shell(shlex.join(map(str, job)), tmp_path, PATIENCE, **environment)
    assert done.returncode != 0
    assert time.monotonic() - began < PATIENCE
    lines = [line for line in done.stderr.splitlines() if "the workers do not agree" in line]
    assert lines
    for line in lines:
        assert "setting lr: 0.1 on worker(s) 0, 0.5 on worker(s) 1" in line


NODE = """
import os, signal, sys
from gcbench import cli
from gcbench.training.train import Trainer

os.makedirs(place := sys.argv.pop(1) + os.environ["RANK"], exist_ok=True)
os.chdir(place)
step = Trainer.train_step

def stopped(self):
    if self.step == 12:
        os.kill(os.getpid(), signal.SIGTERM)
    return step(self)

Trainer.train_step = stopped
cli.main()
"""


def test_nodes_without_a_shared_results_folder_get_its_name(programs, tmp_path):
    """Only worker 0 writes checkpoints, and every rank reads them."""
    (tmp_path / "node.py").write_text(NODE)
    words = ("run", "--task", "quadratic", "--steps", 30, "--progress", "none")
    job = ("torchrun", "--standalone", "--nproc-per-node", 2, "node.py", tmp_path / "node", *words)
    environment = {"OMP_NUM_THREADS": "1", launch.TIMEOUT: "240"}
    for message in ("stopped after step 20 of 30", "--results: 20 on worker(s) 0, 0 on worker"):
        done = programs.shell(shlex.join(map(str, job)), tmp_path, PATIENCE, **environment)
        assert done.returncode != 0
        assert message in done.stderr
