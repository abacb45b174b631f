"""The checks of memories refuse wrong memories, and none of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from gcbench.checks import memories
from gcbench.core import memory, registry
from gcbench.core.memory import Memory

Residual = registry.memory_class("residual")


@pytest.mark.parametrize("name", sorted({*registry.memories()} - {memory.FORCED}))
def test_our_memories_hold(name):
    rows = memories.verify(memory.make(name, {}), registry.compressor("topk"))
    assert [row for row in rows if row.verdict == "fails"] == []
    assert {row.check for row in rows} == {*memories.CHECKS}


class Half(Residual):
    """Keeps half of the error."""

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"]).mul_(0.5)


class Changing(Residual):
    """Changes the gradient."""

    def offer(self, gradient, ctx):
        return gradient.add_(ctx.state["residual"])


class Hiding(Residual):
    """Carries the error in an attribute, and so loses it at a restart."""

    hidden: ClassVar[dict] = {}

    def offer(self, gradient, ctx):
        return gradient + self.hidden.get(id(ctx.state), 0.0)

    def keep(self, offered, sent, ctx):
        self.hidden[id(ctx.state)] = offered - sent


class Growing(Residual):
    """The residual is half as large again as the error."""

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"]).mul_(1.5)


class Unscaled(Residual):
    """Does not follow the learning rate."""

    def rescale(self, state, factor):
        pass


class Wrong(Residual):
    """Starts at one."""

    def state(self, like):
        return {"residual": torch.ones_like(like)}


@dataclass(frozen=True)
class Shared(Memory):
    """All workers have one buffer."""

    buffers: ClassVar[tuple[str, ...]] = ("residual",)
    residuals: ClassVar[tuple[str, ...]] = ("residual",)
    one: ClassVar[dict] = {}

    def state(self, like):
        self.one.setdefault(len(like), torch.zeros_like(like)).zero_()
        return {"residual": self.one[len(like)]}

    def offer(self, gradient, ctx):
        return gradient + ctx.state["residual"]

    def keep(self, offered, sent, ctx):
        torch.sub(offered, sent, out=ctx.state["residual"])


@pytest.mark.parametrize(
    ("made", "check"),
    [
        (Half, "memory: nothing lost"),
        (Changing, "memory: what was sent"),
        (Hiding, "memory: checkpoint"),
        (Growing, "memory: finite"),
        (Unscaled, "memory: learning rate"),
        (Wrong, "memory: buffers"),
        (Shared, "memory: replicas"),
    ],
)
@pytest.mark.parametrize("name", ["topk", "efsignsgd"])
def test_a_wrong_memory_is_refused(made, check, name):
    """Also beside methods whose feedback is fused, which take over for a plain residual alone."""
    rows = {row.check: row for row in memories.verify(made(), registry.compressor(name))}
    assert rows[check].verdict == "fails"
