"""What an exchange costs, and on which links it pays: one definition for all commands.

On a link of B bit/s with a latency of l seconds a message, an exchange of n elements among N
workers, each of which sends W bytes in R messages one after the other, takes

    T(B) = n (e + p P) + R l + 8 W / B

e: seconds an element in the statistic and encode; p: seconds an element in one pass over a payload;
both are measured inside an exchange, by `gcbench bandwidth`. P: the number of passes, N by
all-gather (every worker's payload), 2 by two-shot (the workers' shards, then the mean), 1 by
all-reduce. If another collective than two-shot was measured, a two-shot exchange adds e / N for the
owners' second encoding, if the method needs one.

The exchange pays where T is smaller than the time of the faster of two ring all-reduces: in fp32,
without any work, and in bf16, with half the bytes, and a cast on both sides at the speed of a copy
(a cast moves 6 bytes an element, a copy 8). The baselines' additions are not counted, which favours
them. `prediction` uses the same terms for a training step, where communication hides under the
backward pass.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gcbench.core import files, registry
from gcbench.core.compressor import Compressor, requantizes
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.values import finite
from gcbench.report import analysis
from gcbench.studies import methods
from gcbench.studies.scale.clusters import Device

KIND = "bandwidth"
"""The kind of analysis from whose table of phases the times are taken."""
STORED = "bandwidth.json"
"""The file name of the committed measurement."""
FLOAT = 4
"""Bytes of a float32."""
COPY = 2 * FLOAT
"""Bytes that a copy of a float32 moves."""
CAST = 6
"""Bytes that a cast between float32 and bfloat16 moves."""

Links = tuple[float, float]
"""A range of links, from and to bit/s; the upper end may be infinite."""


# ---- the definition ------------------------------------------------------------------------------


class Cost(NamedTuple):
    """The costs of an exchange that do not depend on the link."""

    work: float
    """Seconds of one worker in statistic, encode and decode."""
    wire: float
    """Bytes that leave a worker."""
    rounds: float
    """Number of messages one after the other."""

    def seconds(self, link: float, latency: float) -> float:
        """Return T on a link of `link` bit/s with `latency` seconds a message."""
        return self.work + self.rounds * latency + 8 * self.wire / link


def baselines(nbytes: float, workers: int, copy: float) -> tuple[Cost, Cost]:
    """Return the costs of ring all-reduces in fp32 and in bf16, of a float32 gradient of `nbytes`.

    `copy`: seconds that a copy takes for each float32.
    """
    wire, rounds = 2 * (workers - 1) / workers * nbytes, 2.0 * (workers - 1)
    casts = 2 * CAST / COPY * copy * nbytes / FLOAT
    return Cost(0.0, wire, rounds), Cost(casts, wire / 2, rounds)


def pays_on(plain: Cost, own: Cost, latency: float) -> Links | None:
    """Return the links, from and to bit/s, on which `own` is predicted to be faster than `plain`.

    It is where saved / B > spent, with saved = 8 (wire_plain - wire_own) bits, and spent = the
    difference, own - plain, of the terms that do not depend on B. None: on no link.
    """
    saved = 8 * (plain.wire - own.wire)
    spent = own.work - plain.work + (own.rounds - plain.rounds) * latency
    if saved > 0:
        return (0.0, saved / spent) if spent > 0 else (0.0, math.inf)
    if spent < 0:
        return (saved / spent, math.inf)
    return None


def beyond(first: Links | None, second: Links | None) -> Links | None:
    """Return the links that are in both ranges; None for none."""
    if first is None or second is None:
        return None
    low, high = max(first[0], second[0]), min(first[1], second[1])
    return (low, high) if low < high else None


FIELDS = ("pays_on_from", "pays_on_to", "links")
"""Fields of `pays_fields` about fp32; with the suffix `_better`, about both baselines."""


def pays_fields(
    own: Cost, nbytes: float, workers: int, copy: float, latency: float
) -> analysis.Row:
    """Return the links on which an exchange pays as fields of a row.

    `pays_on_from` and `pays_on_to`, in bit/s, and `links` against fp32; the same with `_better`
    against the better of fp32 and bf16. Both ends None: on no link; the upper None alone: no end.
    """
    fp32, bf16 = baselines(nbytes, workers, copy)
    over = pays_on(fp32, own, latency)
    row: analysis.Row = {}
    for suffix, links in (("", over), ("_better", beyond(over, pays_on(bf16, own, latency)))):
        row[f"pays_on_from{suffix}"] = links and links[0]
        row[f"pays_on_to{suffix}"] = links and finite(links[1])
        row[f"links{suffix}"] = links_text(links)
    return row


def covers(row: Mapping[str, Any], link: float, suffix: str = "") -> bool:
    """Return whether a link, in bit/s, is among those of `pays_fields`."""
    low, high = row[f"pays_on_from{suffix}"], row[f"pays_on_to{suffix}"]
    return low is not None and low < link < (math.inf if high is None else high)


def links_text(links: Links | None) -> str:
    """Return links in words, as `clusters.links_text` does; "no link" for none."""
    from gcbench.studies.scale import clusters

    return clusters.links_text([] if links is None else [(1e-9 * links[0], 1e-9 * links[1])])


# ---- the measurement -----------------------------------------------------------------------------


def passes(collective: str, workers: int) -> float:
    """Return P: how many times a worker passes over a payload of its whole gradient."""
    return {"allgather": float(workers), "twoshot": 2.0}.get(collective, 1.0)


@dataclass(frozen=True)
class Codec:
    """Seconds an element of a method, measured inside an exchange."""

    encode: float
    """e: statistic and encode."""
    each: float
    """p: one pass over a payload."""
    collective: str
    """The collective by which it was measured."""
    copy: float
    """Seconds an element of a copy, in the same run."""

    def seconds(
        self, method: Compressor, collective: str, n: float, workers: int
    ) -> tuple[float, float]:
        """Return the seconds of a worker in encoding and in decoding n elements.

        `collective` may be "reducescatter", the first half of a two-shot exchange.
        """
        decode = self.each * passes(collective, workers)
        if collective == "twoshot" != self.collective and requantizes(method):
            decode += self.encode / workers
        return self.encode * n, decode * n

    def on(self, device: Device) -> Codec:
        """Return the times on another device, as the same multiples of that device's copy."""
        factor = COPY / (device.memory_gbyte * 1e9) / self.copy
        return Codec(self.encode * factor, self.each * factor, self.collective, self.copy * factor)


@dataclass(frozen=True)
class Measured:
    """The codecs that one run of `gcbench bandwidth` has measured."""

    found: Mapping[tuple[str, str], Mapping[float, Codec]]
    """Name and expression (`registry.call`) of the compressor -> number of elements -> codec."""
    left: Mapping[str, str]
    """A method's name -> why what was measured under that name is not taken."""
    source: str
    """What was measured, and where, as text for notes."""
    analysis: analysis.Analysis
    """The analysis of that run."""

    def of(self, method: Compressor, n: float) -> Codec | None:
        """Return the codec of a method at the size nearest to n.

        None if it was not measured with exactly these fields: another configuration may take ten
        times as long.
        """
        own = self.found.get((method.name, registry.call(method)))
        if own is None:
            return None
        return own[min(own, key=lambda elements: abs(math.log(elements / n)))]

    def told(self, chosen: Iterable[Compressor]) -> list[str]:
        """Return a sentence for each of these methods that was measured with other code."""
        names = dict.fromkeys(method.name for method in chosen)
        return [
            f"Times of {name} in the measurement are not taken: {self.left[name]}."
            for name in names
            if name in self.left
        ]


def _here(word: str) -> Compressor | None:
    """Return the method that a word of a measurement means here; None for one that is not known.

    A file's compressor is known by its name once it was asked for: a measurement that names a file
    runs none.
    """
    start, *fields = word.split(":")
    name = Path(start).stem if start.endswith(".py") else start
    try:
        return methods.parse(":".join([name, *fields]))
    except GcbenchError:
        return None


def _apart(method: Compressor, measured: str | None) -> str | None:
    """Return why times of a method with the source `measured` are not of today's; None if they are.

    `measured` is by `methods.sources`, None in a measurement that does not tell.
    """
    if measured is None:
        if registry.origin(registry.compressors()[method.name]) is None:
            return None
        return "it does not tell of which source they are, and the method is not built in"
    now = registry.source_digest(method.name)
    return None if measured == now else f"they are of its source {measured}, which is now {now}"


def of_analysis(made: analysis.Analysis) -> Measured:
    """Return the codecs of a finished `gcbench bandwidth`, of methods whose source is the same.

    Raises:
        GcbenchError: it has no table of phases or of transfers.
    """
    phases, transfers = made.table("phases").rows, made.table("transfers").rows
    copies = {row["size"]: float(row["p50"] or 0) for row in transfers if row["method"] == "memcpy"}
    workers = int(made.settings["workers"])
    sources = made.settings.get("sources") or {}
    found: dict[tuple[str, str], dict[float, Codec]] = {}
    left: dict[str, str] = {}
    for row in phases:
        method = _here(str(row["method"]))
        if row["size"] not in copies or method is None:
            continue
        if (reason := _apart(method, sources.get(row["method"]))) is not None:
            left[method.name] = reason
            continue
        key = method.name, registry.call(method)
        n, collective = int(row["size"] or 0) / FLOAT, str(row["collective"])
        seconds = {part: float(row[part] or 0) for part in ("statistic", "encode", "decode")}
        found.setdefault(key, {}).setdefault(
            n,
            Codec(
                (seconds["statistic"] + seconds["encode"]) / n,
                seconds["decode"] / n / passes(collective, workers),
                collective,
                copies[row["size"]] / n,
            ),
        )
    machine = made.provenance.get("machine", {})
    threads = made.settings["threads"]
    source = (
        f"inside exchanges of {workers} workers on {machine.get('gpu') or machine.get('cpu')}, "
        f"{threads} thread{'s' * (threads > 1)}, medians of {made.settings['iterations']}"
    )
    return Measured(found, left, source, made)


def load(path: Path) -> Measured:
    """Read what `gcbench bandwidth --json` printed.

    Raises:
        UsageError: the file does not exist, or holds something else.
    """
    return of_analysis(_read(path))


@cache
def _read(path: Path) -> analysis.Analysis:
    try:
        data = json.loads(files.read_text(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or data.get("kind") != KIND:
        raise UsageError(f"{path} is no measurement: `gcbench bandwidth --json > {path}` makes one")
    return analysis.parse(data, path)


def measuring(words: Iterable[str]) -> str:
    """Return in words how to measure the times of these methods."""
    command = shlex.join(["gcbench", "bandwidth", "--compressor", ",".join(words), "--json"])
    return f"`{command} > m.json`, then this command with --kernels m.json"


def is_measurement(path: Path) -> bool:
    """Return whether a file is one for `load`, and not one of kernel timings."""
    try:
        data = json.loads(files.read_text(path))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") == KIND


def stored() -> Measured | None:
    """Return the committed measurement, which is part of the package; None if it is missing."""
    from gcbench.studies.scale import shipped

    path = shipped.path(STORED)
    return None if path is None else load(path)
