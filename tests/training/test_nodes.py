"""Jobs of two nodes, with a torchrun for each on this machine; a dead node; Slurm's script."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from commands import ROOT
from pages import blocks

PATIENCE = 120
RUN = ("-m", "gcbench", "run", "--task", "quadratic", "--workers", "4", "--progress", "plain")
PAGE = ROOT / "gcbench/docs/several-machines.md"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Nodes:
    """Two nodes of two workers; each node is a session of its own, with its output in a file."""

    def __init__(self, folder: Path, *words: str) -> None:
        port = free_port()
        self.outputs = [folder / f"out-{node}" for node in (0, 1)]
        self.jobs = []
        for node, path in enumerate(self.outputs):
            place = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2")
            store = ("--master-addr", "127.0.0.1", "--master-port", str(port))
            command = [sys.executable, "-m", "torch.distributed.run", *place, *store, *RUN, *words]
            with path.open("w") as out:
                job = subprocess.Popen(
                    command, cwd=folder, stdout=out, stderr=out, start_new_session=True
                )
            self.jobs.append(job)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for node in (0, 1):
            self.kill(node)

    def kill(self, node: int) -> None:
        """Kill every process of a node."""
        listed = subprocess.run(
            ["ps", "-o", "pid=", "-s", str(self.jobs[node].pid)], capture_output=True, text=True
        )
        for pid in map(int, listed.stdout.split()):
            os.kill(pid, signal.SIGKILL)
        self.jobs[node].wait()

    def text(self, node: int) -> str:
        return self.outputs[node].read_text()

    def wait_for(self, text: str) -> None:
        """Wait until node 0 has printed a text."""
        deadline = time.monotonic() + PATIENCE
        while text not in self.text(0):
            assert time.monotonic() < deadline, self.text(0)
            time.sleep(0.2)


def test_a_dead_node_ends_every_rank_in_at_most_a_line_and_the_job_resumes(tmp_path) -> None:
    words = ("--compressor", "terngrad", "--steps", "100000", "--checkpoint-seconds", "0")
    with Nodes(tmp_path, *words) as nodes:
        nodes.wait_for("step 50/")
        nodes.kill(1)
        assert nodes.jobs[0].wait(PATIENCE) != 0
        messages = re.findall(r"^gcbench: worker (\d): .*workers? 2, 3 ended", nodes.text(0), re.M)
        # torchrun ends the others once one has failed, perhaps before they print.
        assert sorted(messages) in (["0"], ["1"], ["0", "1"])
        lines = nodes.text(0).count("gcbench: ")
        assert len(messages) <= lines <= 2, "at most one line per rank"
        assert "Traceback" not in nodes.text(0).partition("torch/distributed/elastic")[0]
    with Nodes(tmp_path, *words) as nodes:
        nodes.wait_for("resum")
        nodes.wait_for("step 200/")


STAND_INS = {
    "scontrol": "#!/bin/sh\nprintf 'localhost\\nelsewhere\\n'\n",
    "srun": '#!/bin/sh\nfor node in 0 1; do "$@" > "out-$node" 2>&1 & done\nwait\n',
}


def test_the_script_for_slurm_starts_one_job_over_all_nodes(programs, tmp_path) -> None:
    (script,) = [one.text for one in blocks(PAGE.read_text()) if "SLURM" in one.text]
    (tmp_path / "gcbench.sbatch").write_text(script.replace("29500", str(free_port())))
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost,elsewhere"}
    words = "--task quadratic --steps 10 --compressor int8"
    command = f'PATH="$PWD:$PATH" bash gcbench.sbatch {words}'
    done = programs.shell(command, tmp_path, PATIENCE, **slurm)
    outputs = "".join((tmp_path / f"out-{node}").read_text() for node in (0, 1))
    assert done.returncode == 0, done.stderr + outputs
    assert "2 workers, torchrun" in outputs
    assert len(list(tmp_path.glob("results/runs/*/summary.json"))) == 1
