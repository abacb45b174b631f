"""Training over real links of a chosen rate, on one machine: what does compression gain on them?

Each node is a network namespace with one shaped link to a switch, and torchrun starts its workers
there (`gcbench.netlab.inside`). Times are wall-clock times of training; nothing is modelled.
The nodes share this machine's cores, so computation is slower than on separate machines.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from gcbench.core import settings_file
from gcbench.core.errors import UsageError
from gcbench.core.values import items_of
from gcbench.netlab import launcher
from gcbench.netlab.links import Link, parse_delay, parse_rate
from gcbench.report.analysis import Analysis, Ledger, Row, Shown, Table

if TYPE_CHECKING:
    from gcbench.core.progress import Observer

KIND = "netlab"
RESERVED = (
    *("--workers", "--results", "--rows", "--suite", "--json", "--progress", "--force"),
    *("--capture", "--capture-layers", "--sink", "--checkpoint-seconds"),
)
"""Flags of `gcbench run` that the lab sets or cannot use: it keeps only measurements of a run."""
SEGMENT = 1448
"""Payload bytes of a full TCP segment with timestamps in an Ethernet frame of 1,500 bytes."""
HEADERS = 66
"""Bytes of its Ethernet (14), IP (20) and TCP (32) headers."""


class Settings(BaseModel):
    """The settings that decide the result."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    nodes: int = Field(default=4, ge=2, le=64, description="Network namespaces.")
    workers_per_node: int = Field(default=1, ge=1, le=16, description="Workers on each node.")
    bandwidth: list[str] = Field(default=["100mbit", "1gbit"], min_length=1)
    delay: list[str] = Field(default=["0"], min_length=1)
    loss: list[float] = Field(default=[0.0], min_length=1)
    compressors: list[str] = Field(min_length=1)
    arguments: list[str]
    """The other words of `gcbench run`."""
    sources: dict[str, str] = {}
    """Digests of the compressors' code and of the files in `arguments`, so that a result is not
    reused after one of them was edited."""

    @field_validator("loss")
    @classmethod
    def _is_share(cls, loss: list[float]) -> list[float]:
        if not all(0 <= share < 1 for share in loss):
            raise ValueError("expected shares of packets from 0 to below 1, e.g. 0.01")
        return loss

    @property
    def workers(self) -> int:
        """Workers of the job."""
        return self.nodes * self.workers_per_node

    def links(self) -> list[Link]:
        """Return all combinations of rate, delay and loss, each once.

        Raises:
            UsageError: a rate or delay cannot be parsed.
        """
        links = [
            Link(parse_rate(rate), parse_delay(delay), loss)
            for rate in self.bandwidth
            for delay in self.delay
            for loss in self.loss
        ]
        return list({link.name: link for link in links}.values())


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words of a `gcbench run` command into its compressors and its other flags.

    Without --compressor, the compressors are those of its --config file, or the default of `run`.

    Raises:
        UsageError: another command, a setting that the lab sets itself, or a file that cannot be
            read.
    """
    command, *rest = words or [""]
    if command != "run":
        raise UsageError(
            f"netlab received the command {command!r}; expected run after `--`, e.g. "
            "gcbench netlab -- run --compressor none,terngrad --task mnist"
        )
    others, compressors = list[str](), None
    words_left = iter(rest)
    for word in words_left:
        flag, equals, value = word.partition("=")
        if flag in RESERVED:
            raise UsageError(
                f"netlab received {flag} after `--`; netlab sets it or cannot use it: leave it out"
            )
        if flag == "--compressor":
            compressors = value if equals else next(words_left, "")
        else:
            others.append(word)
    file = file_settings(others)
    if "workers" in file:
        raise UsageError(
            "netlab received a --config with workers; netlab sets them: leave them out"
        )
    if compressors is None:
        named = file.get("compressor", "terngrad")
        compressors = ",".join(map(str, named if isinstance(named, list) else [named]))
    return items_of("--compressor", compressors), others


def file_settings(words: Sequence[str]) -> dict[str, Any]:
    """Return the settings in the file of --config, if these words have one."""
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag == "--config":
            return settings_file.read(Path(value if equals else following))
    return {}


def steps(settings: Settings) -> int:
    """Return the number of measurements."""
    return len(settings.links()) * len(settings.compressors)


def _measure(settings: Settings, link: Link, spec: str) -> dict[str, Any]:
    """Train with one method over one link; return what the tables need.

    Raises:
        GcbenchError: see `launcher.measure`.
    """
    folder = tempfile.mkdtemp(prefix="gcbench-netlab-")
    try:
        arguments = ["run", "--compressor", spec, *settings.arguments]
        arguments += ["--workers", str(settings.workers), "--results", folder]
        record = launcher.measure(
            {
                "nodes": settings.nodes,
                "workers_per_node": settings.workers_per_node,
                "bits_per_second": link.bits_per_second,
                "delay": link.delay,
                "loss": link.loss,
                "arguments": [*arguments, "--json", "--progress", "none"],
            }
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    summary = record["summary"]
    return {
        "achieved": record["link"]["bits_per_second"],
        "round_trip": record["link"]["round_trip"],
        "step_seconds": summary["step_seconds"],
        "communicate_seconds": summary["phase_seconds"]["communicate"],
        "counted_bytes": summary["wire_bytes"]["total"],
        "interface_bytes": sum(record["sent"]),
        "test_accuracy": summary.get("test_accuracy"),
        "seconds": summary["seconds"],
        "steps": summary["steps"],
        "params_sha256": summary["params_sha256"],
    }


def run(settings: Settings, command: str, observer: Observer, ledger: Ledger) -> Analysis:
    """Measure every method over every link; finished measurements come from the ledger.

    Raises:
        UsageError: this machine cannot create namespaces, or a link cannot be parsed.
        GcbenchError: a lab or a training run failed.
    """
    launcher.isolate()
    done = 0
    for link in settings.links():
        for spec in settings.compressors:
            key = f"{link.name}/{spec}"
            if key not in ledger:
                ledger[key] = _measure(settings, link, spec)
            done += 1
            observer.step(done, key)
    return summarize(settings, command, ledger)


def summarize(settings: Settings, command: str, records: Any) -> Analysis:
    """Return the tables of measurements, which `records` holds by link and method."""
    rows, links = list[Row](), list[Row]()
    for link in settings.links():
        measured = {spec: records[f"{link.name}/{spec}"] for spec in settings.compressors}
        plain = {name: measured.get(name, {}).get("step_seconds") for name in ("none", "bf16")}
        first = next(iter(measured.values()))
        links.append(
            {
                "link": link.name,
                "achieved": first["achieved"],
                "share": first["achieved"] / link.bits_per_second if link.bits_per_second else None,
                "round_trip": first["round_trip"],
            }
        )
        for spec, record in measured.items():
            # Within a node nothing passes an interface, so there the two cannot be compared.
            passed = record["counted_bytes"] if settings.workers_per_node == 1 else 0
            framed = passed * (1 + HEADERS / SEGMENT)
            rows.append(
                {
                    "link": link.name,
                    "method": spec,
                    **record,
                    "over_fp32": plain["none"] and plain["none"] / record["step_seconds"],
                    "over_bf16": plain["bf16"] and plain["bf16"] / record["step_seconds"],
                    "excess": record["interface_bytes"] / framed - 1 if framed else None,
                }
            )
    place = f"{settings.workers} workers on {settings.nodes} nodes"
    return Analysis.of(
        KIND,
        settings,
        command,
        tables=[
            Table(
                name="steps",
                title=f"Seconds per step, {place}",
                shown=COLUMNS,
                which=2,
                rows=rows,
                notes=[NOTE],
            ),
            Table(
                name="links",
                title="The links, measured before the first run",
                shown=LINKS,
                rows=links,
            ),
        ],
        conclusions=fastest(rows),
    )


def fastest(rows: Sequence[Row]) -> list[str]:
    """Return one sentence per link: the method with the shortest step, and fp32's step."""
    sentences = []
    for link in dict.fromkeys(row["link"] for row in rows):
        here = [row for row in rows if row["link"] == link]
        best = min(here, key=lambda row: float(row["step_seconds"] or 0))
        gain = best["over_fp32"]
        compared = "" if gain is None else f", {gain:.2f} times as fast as fp32"
        sentences.append(
            f"{link}: {best['method']} has the shortest step, "
            f"{1e3 * float(best['step_seconds'] or 0):.1f} ms{compared}."
        )
    return sentences


COLUMNS = [
    Shown(field="link", heading="link"),
    Shown(field="method", heading="method"),
    Shown(field="step_seconds", heading="step\nms", scale=1e3),
    Shown(field="communicate_seconds", heading="network\nms", scale=1e3),
    Shown(field="over_fp32", heading="speed\nvs fp32"),
    Shown(field="over_bf16", heading="speed\nvs bf16"),
    Shown(field="counted_bytes", heading="counted\nMB", scale=1e-6),
    Shown(field="interface_bytes", heading="sent\nMB", scale=1e-6),
    Shown(field="excess", heading="excess\n%", scale=100),
]
LINKS = [
    Shown(field="link", heading="link"),
    Shown(field="achieved", heading="achieved\nMbit/s", scale=1e-6),
    Shown(field="share", heading="of nominal\n%", scale=100),
    Shown(field="round_trip", heading="round trip\nms", scale=1e3),
]
NOTE = (
    "counted: bytes of the tensors in collectives; sent: bytes that left the nodes' interfaces; "
    f"excess: sent above counted with {HEADERS} bytes of headers per {SEGMENT} bytes, which also "
    "holds start-up, acknowledgements and retransmissions. It needs one worker per node."
)


def draw(analysis: Analysis, path: Path) -> None:
    """Draw the time per step of each method and link, split into network and the rest.

    Raises:
        GcbenchError: `path` cannot be written.
    """
    from gcbench.report import figures

    rows = analysis.table("steps").rows
    links = list(dict.fromkeys(str(row["link"]) for row in rows))
    methods = list(dict.fromkeys(str(row["method"]) for row in rows))
    with figures.canvas(2.5 + 5.5 * len(links), 1.8 + 0.55 * len(methods)) as figure:
        panels = figure.subplots(1, len(links), sharey=True, squeeze=False)[0]
        for axes, link in zip(panels, links, strict=True):
            here = [row for row in rows if row["link"] == link]
            network = [1e3 * float(row["communicate_seconds"] or 0) for row in here]
            whole = [1e3 * float(row["step_seconds"] or 0) for row in here]
            names = [str(row["method"]) for row in here]
            axes.barh(names, whole, color="#C9CDD2", label="other work")
            axes.barh(names, network, color="#33658F", label="network")
            axes.set_title(link)
            axes.set_xlabel("milliseconds per step")
            axes.invert_yaxis()
        panels[0].legend(frameon=False, loc="lower right")
        figures.save(figure, path)
