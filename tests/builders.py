"""What several tests build."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

from gcbench.core.compressor import Compressor, Key, Payload, Segments


def encode_shards(
    method: Compressor,
    x: Tensor,
    segments: Segments,
    shared: Tensor,
    key: Key,
    bounds: Sequence[int],
) -> list[Payload]:
    """Return a worker's payload of each shard `[bounds[k], bounds[k + 1])`, as in a two-shot."""
    if method.cuttable:
        return method.cut(method.encode(x, segments, shared, key), bounds)
    payloads = []
    for start, stop in pairwise(bounds):
        shard, which = segments.shard(start, stop)
        scales = shared[which.start : which.stop] if shared.numel() else shared
        place = key._replace(offset=key.offset + start)
        payloads.append(method.encode(x[start:stop], shard, scales, place))
    return payloads
