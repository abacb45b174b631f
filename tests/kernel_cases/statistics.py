"""Statistics of segments."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_cases import Call, nonfinite, segmentations, values


def cases(n: int) -> Iterator[Call]:
    for cut, segments in segmentations(n):
        for what, x in (*values(n), *nonfinite(n)):
            yield Call("statistics.absmax", f"{what} {cut}", (x, segments))
            yield Call("statistics.moments", f"{what} {cut}", (x, segments))
            for clip, at_limit in ((2.5, False), (2.5, True), (0.0, False)):
                yield Call(
                    "ternary.scales",
                    f"{what} {cut} clip {clip} {at_limit}",
                    (x, segments, clip),
                    {"at_limit": at_limit},
                )
