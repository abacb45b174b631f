"""What a rank says of the others when a collective of a hook ends in a time-out."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gcbench.integrations import hook_world
from gcbench.integrations.hook_world import HookWorld

TIMED_OUT = RuntimeError("Timed out waiting 25000ms for recv operation to complete")


@pytest.fixture
def worlds(monkeypatch):
    """Two ranks of a job that share a store, and are one step apart."""
    monkeypatch.setattr(hook_world, "ROLL_CALL_SECONDS", 5.0)
    store = dist.HashStore()
    both = [
        HookWorld(torch.device("cpu"), (0, 1), rank, timedelta(seconds=25), "timeout=25")
        for rank in range(2)
    ]
    for world, place in zip(
        both, ("exchange of gradients, step 3", "forward, step 4"), strict=True
    ):
        world.store, world.place[0] = store, place
    return both


def test_ranks_that_wait_at_different_places_name_both(worlds):
    with ThreadPoolExecutor(2) as pool:
        lost = [*pool.map(lambda world: str(world._lost(TIMED_OUT, 25.0)), worlds)]
    for rank, text in enumerate(lost):
        assert text.startswith(f"rank {rank}: ")
        assert "rank 0: exchange of gradients, step 3; rank 1: forward, step 4" in text


def test_a_rank_that_does_not_answer_may_wait_elsewhere(worlds, monkeypatch):
    monkeypatch.setattr(hook_world, "ROLL_CALL_SECONDS", 0.1)
    text = str(worlds[0]._lost(TIMED_OUT, 25.0))
    assert "without an answer from rank 1" in text


def test_the_cause_is_the_error_of_the_rank_that_failed_first(worlds):
    worlds[1].report(ValueError("the first"))
    assert "because rank 1 failed: ValueError: the first" in str(worlds[0]._lost(TIMED_OUT, 25.0))


def test_worlds_of_one_group_share_the_last_exchange(worlds):
    first, second = worlds
    second.join(first)
    first.place[0] = "exchange of gradients, step 5"
    assert second.place == ["exchange of gradients, step 5"]
