"""States of an exchange for another number of workers."""

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
    """Return a state for the only local worker of an exchange, from those of all workers before.

    The sum of the workers' residuals is kept: worker r takes those of the workers before whose
    ranks leave r when divided by the new number, and 0 if there are none. Owners' residuals, which
    belong to the mean, go with their elements to the new owners. As the mean divides by the number
    of workers, what is carried reaches it scaled by the old number over the new.

    Args:
        saved: what `Exchange.state_dict` returned on each worker, by rank.
        exchange: with the lanes of now.
        residuals: names of the buffers that may be added up.

    Raises:
        UsageError: a state is damaged, or a buffer is no residual and cannot be added up.
    """
    rank, before, now = exchange.world.ranks[0], len(saved), exchange.world.size
    for each in saved:
        sealed.check_seal(each)
    lanes = [by_lane(each, len(exchange.lanes))[0] for each in saved]
    tensors = dict(saved[0].get("tensors", {}))
    for number, lane in enumerate(exchange.lanes):
        own: dict[str, Tensor] = {}
        for name in lanes[0][number]:
            parts = [sealed.entry(each[number], name) for each in lanes]
            if name == "owner":
                begin, end = lane.bounds(now)[rank : rank + 2]
                own[name] = torch.cat(parts)[begin:end].clone()
            elif name in residuals:
                own[name] = torch.zeros(lane.segments.numel)
                for part in parts[rank::now]:
                    own[name] += part
            else:
                raise UsageError(
                    f"the buffer {name!r} of {lane.memory!r} cannot be divided among another "
                    f"number of ranks than {before}: only residuals can. Go on with {before} "
                    "ranks, or register a hook without a state"
                )
        tensors |= {f"memory {number} {name}": value for name, value in own.items()}
    zeros = [0.0, 0.0, 0.0]
    counts = {
        name: saved[rank][name] if rank < before else zeros for name in ("traffic", "agreement")
    }
    state = {**saved[0], "rank": rank, "world_size": now, **counts}
    if tensors:
        state["tensors"] = tensors
    return sealed.seal({name: value for name, value in state.items() if name != "digest"})
