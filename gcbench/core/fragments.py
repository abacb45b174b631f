"""Streaming local steps: parameters in fragments that are exchanged one after the other.

With P fragments and rounds of H steps, fragment f is exchanged after every step t with
t mod H = f H / P (steps counted from 1), so that each is exchanged once a round and the peak of the
traffic is 1/P. V steps later the workers take its new common values over: their parameters become
A times their own plus 1 - A times the common ones. The last step exchanges all fragments but those
whose values are still on the way. P = 1, V = 0, A = 0 are rounds without fragments.
Source: Douillard et al. 2025 (Streaming DiLoCo), arXiv:2501.18512.

A parameter's block is the first number in its name (`h.3.attn.weight`: 3). Fragment 0 has the
parameters without a block, and the blocks follow in turn in fragments 1 to P - 1; if all parameters
have blocks, in fragments 0 to P - 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from gcbench.core.errors import UsageError


class Rounds(NamedTuple):
    """After which steps fragments are exchanged and taken over."""

    every: int
    """H, steps per round."""
    fragments: int
    """P; divides `every`."""
    delay: int
    """V, steps from the exchange of a fragment until it is taken over; below H / P."""
    steps: int = sys.maxsize
    """Steps of the run, if they are known."""

    def check(self, every: str) -> None:
        """Check that the values fit; `every`: the name of the setting for H.

        Raises:
            ValueError: P does not divide H, or V reaches the next exchange.
        """
        apart, rest = divmod(self.every, self.fragments) if self.fragments else (0, 0)
        if rest or not apart:
            raise ValueError(
                f"fragments={self.fragments} with {every}={self.every}: expected a divisor of "
                f"{every}, or {every}={self.fragments * max(1, apart)}"
            )
        if self.delay >= apart:
            raise ValueError(
                f"delay={self.delay}: the next exchange follows after {apart} step(s); expected "
                "fewer"
            )

    @property
    def apart(self) -> int:
        """Steps between two exchanges."""
        return self.every // self.fragments

    def _sent(self, done: int) -> list[int]:
        """Return the fragments that are exchanged after `done` steps, without the last step's."""
        return [done % self.every // self.apart] if done > 0 and done % self.apart == 0 else []

    def sent(self, done: int) -> list[int]:
        """Return the fragments that are exchanged after `done` steps."""
        if done < self.steps:
            return self._sent(done)
        waiting = self.recent(done - 1, self.delay)
        return [f for f in range(self.fragments) if f not in waiting]

    def recent(self, done: int, steps: int) -> set[int]:
        """Return the fragments that are exchanged after one of the last `steps` steps to `done`."""
        return {f for late in range(steps) for f in self._sent(done - late)}

    def taken(self, done: int) -> list[int]:
        """Return the fragments that the workers take over after `done` steps."""
        return self._sent(done - self.delay) if self.delay else self.sent(done)


def of_names(names: Sequence[str], fragments: int) -> list[int]:
    """Return the fragment of each parameter.

    Raises:
        UsageError: the model has too few blocks.
    """
    numbers = [next((int(p) for p in name.split(".") if p.isdecimal()), None) for name in names]
    blocks = sorted({number for number in numbers if number is not None})
    first = int(None in numbers)
    if fragments == 1:
        return [0] * len(names)
    if len(blocks) < fragments - first:
        raise UsageError(
            f"fragments={fragments}: this model has {len(blocks)} blocks, so at most "
            f"{len(blocks) + first} fragments"
        )
    turn = {block: first + i % (fragments - first) for i, block in enumerate(blocks)}
    return [0 if number is None else turn[number] for number in numbers]
