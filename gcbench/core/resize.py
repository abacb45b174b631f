"""Conversion of an exchange's state to another number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core import sealed
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, by_lane


def redistributed(
    saved: Sequence[Mapping[str, Any]], exchange: Exchange, residuals: Sequence[str]
) -> dict[str, Any]:
    """Return a state for the only local worker of an exchange, from the states of all old workers.

    The mean of the workers' residuals is preserved, which is the part of the updates that was not
    sent: of N new workers, worker r receives N / (old number) times the residuals of all old ranks
    that equal r modulo N, or 0. Owners' residuals, which belong to the mean, move with their
    elements to the new owners.

    Args:
        saved: the results of `Exchange.state_dict` on the old workers, by rank.
        exchange: the exchange of the new workers.
        residuals: names of the buffers that may be summed.

    Raises:
        UsageError: a state is damaged, or a buffer is not a residual and cannot be summed.
    """
    rank, before, now = exchange.world.ranks[0], len(saved), exchange.world.size
    for each in saved:
        sealed.check_seal(each)
    lanes = [by_lane(each, len(exchange.lanes))[0] for each in saved]
    tensors = dict(saved[0].get("tensors", {}))
    for number, lane in enumerate(exchange.lanes):
        buffers: dict[str, Tensor] = {}
        for name in lanes[0][number]:
            parts = [sealed.entry(each[number], name) for each in lanes]
            if name == "owner":
                begin, end = lane.bounds(now)[rank : rank + 2]
                buffers[name] = torch.cat(parts)[begin:end].clone()
            elif name in residuals:
                buffers[name] = torch.zeros(lane.segments.numel, dtype=torch.float32)
                for part in parts[rank::now]:
                    buffers[name] += part
                buffers[name] *= now / before
            else:
                raise UsageError(
                    f"the buffer {name!r} of {lane.memory!r}, saved with {before} ranks, cannot be "
                    f"converted to {now} ranks: only residuals can. Resume with {before} ranks, or "
                    "register a hook without a state"
                )
        tensors |= {f"memory {number} {name}": value for name, value in buffers.items()}
    zeros = [0.0, 0.0, 0.0]
    counts = {
        name: saved[rank][name] if rank < before else zeros for name in ("traffic", "agreement")
    }
    state = {**saved[0], "rank": rank, "world_size": now, **counts}
    if tensors:
        state["tensors"] = tensors
    return sealed.seal({name: value for name, value in state.items() if name != "digest"})
