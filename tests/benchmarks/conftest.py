"""Options of the benchmarks, and what is kept of a run: `gcbench kernels` reads it."""

from __future__ import annotations

import torch

from benchmarks.sizes import SIZES
from gcbench.training import configuration

KEPT = ("median", "iqr", "min", "rounds")


def _list(text: str) -> list[str]:
    return [item for item in text.split(",") if item]


def pytest_addoption(parser):
    group = parser.getgroup("gcbench")
    group.addoption("--sizes", type=_list, default=list(SIZES), help=f"default {','.join(SIZES)}")
    group.addoption("--threads", type=_list, help="default 1 and all cores")
    group.addoption("--isas", type=_list, help="CPU instruction sets; default the best two")
    group.addoption("--seconds", type=float, default=0.1, help="seconds a row; default 0.1")


def pytest_sessionstart():
    """Free a large tensor, as every training does at once.

    glibc keeps freed memory from then on. Before, a short call whose result lies at the heap's end
    would have the kernel take these pages away and give them again: 4 microseconds each time.
    """
    torch.zeros(2**22)


def pytest_benchmark_generate_machine_info(config):
    return {**configuration.machine(), "versions": configuration.versions()}


def pytest_benchmark_update_json(output_json):
    """Keep what the table needs, without each sample."""
    commit = output_json["commit_info"]
    names = commit["id"] != "unversioned"
    output_json["commit_info"] = {
        "id": commit["id"] if names else None,
        "dirty": commit.get("dirty"),
    }
    output_json["benchmarks"] = [
        {
            "name": row["name"],
            "extra_info": row["extra_info"],
            "stats": {key: row["stats"][key] for key in KEPT},
        }
        for row in output_json["benchmarks"]
    ]
