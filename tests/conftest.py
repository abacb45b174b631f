"""Shared fixtures."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from gcbench.clock import Clock
from gcbench.world import Link, SimulatedWorld


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the golden bytes of all compressors"
    )


@pytest.fixture(autouse=True)
def _threads():
    """One thread a test, so that tests do not crowd each other out; undo what a world changes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def simulated():
    """Return a function that makes a simulated world, closed after the test."""
    worlds = []

    def make(workers: int) -> SimulatedWorld:
        world = SimulatedWorld(workers, torch.device("cpu"), Link(10.0, 50.0), 1, 2)
        worlds.append(world)
        return world

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def clock():
    return Clock(torch.device("cpu"))


@pytest.fixture
def real_data() -> Path:
    """The folder with the real data sets; the test is skipped where there is none."""
    folder = os.environ.get("GCBENCH_DATA")
    if not folder:
        pytest.skip("GCBENCH_DATA is not set: no real data here")
    return Path(folder)
