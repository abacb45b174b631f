"""Whether the same runs on several machines end in the same parameters (`compare --by machine`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gcbench.core.errors import UsageError
from gcbench.core.values import canonical
from gcbench.report.rendering import (
    LINES,
    Column,
    block,
    counted,
    csv_text,
    cut_lines,
    fitted,
    json_text,
    sentence,
)
from gcbench.results.reader import Run

SHA = "params_sha256"
"""The key of a summary that has the digest of a run's final parameters."""


class Place(NamedTuple):
    """Where a run was made: the machine and torch, and the path that the user named."""

    system: str
    torch: str
    path: str

    @classmethod
    def of(cls, run: Run, paths: Mapping[Path, Path]) -> Place:
        """Return the place of a run; `paths`: what was read -> what the user named."""
        provenance = run.summary.provenance
        machine: Mapping[str, Any] = provenance.get("machine") or {}
        facts = (machine.get("gpu"), machine.get("cpu"), machine.get("isa"))
        cores = f"{machine['cores']} cores" if machine.get("cores") else None
        system = ", ".join(str(fact) for fact in (*facts, cores) if fact) or "unknown"
        above = (named for read, named in paths.items() if run.source.is_relative_to(read))
        path = next(above, run.source)
        torch = str((provenance.get("versions") or {}).get("torch", "unknown"))
        return cls(system, torch, str(path))


def rows(
    runs: Sequence[Run], paths: Mapping[Path, Path]
) -> tuple[list[Place], list[dict[str, Any]]]:
    """Return the places, and one row per configuration and seed that at least two of them have.

    Copies of one run, such as a folder and its bundle, count once: the first one.

    A row has the `method`, `seed`, `places` (their numbers from 1), the digests of the parameters
    and of the results of each, and `agree`: False if two digests differ, True if all are recorded
    and equal, else None.

    Raises:
        UsageError: all runs are of one place, or no configuration and seed is of two.
    """
    places: dict[Place, int] = {}
    groups: dict[tuple[str, int], dict[int, Run]] = {}
    unique: dict[str, Run] = {}
    for run in runs:
        unique.setdefault(_identity(run), run)
    for run in unique.values():
        number = places.setdefault(Place.of(run, paths), len(places) + 1)
        groups.setdefault((run.method, run.summary.seed), {}).setdefault(number, run)
    common = [group for group in groups.values() if len(group) > 1]
    if not common:
        names = "; ".join(f"{place.system} ({place.path})" for place in list(places)[:3])
        raise UsageError(
            f"--by machine: {counted(len(places), 'machine')} ({names}), and no two of them have "
            "runs with the same configuration and seed (copies of one run count once). Add rows "
            "of the same runs from another machine, such as a colleague's bundle (`gcbench bundle "
            "RUNS -o x.zip`)"
        )
    result = []
    for group in common:
        first = next(iter(group.values()))
        digests = [run.summary.more.get(SHA) for run in group.values()]
        result.append(
            {
                "method": first.summary.compressor_name,
                "compressor": first.summary.compressor,
                "task": first.summary.task,
                "workers": first.summary.workers,
                "steps": first.summary.steps,
                "lr": first.config.get("lr"),
                "seed": first.summary.seed,
                "places": [*group],
                SHA: digests,
                "agree": _agree(digests),
                "same_result": len({run.outcome for run in group.values()}) == 1,
            }
        )
    return [*places], result


def _agree(digests: Sequence[Any]) -> bool | None:
    """Return whether digests are equal; None if those that are recorded do not decide it."""
    if len({digest for digest in digests if digest is not None}) > 1:
        return False
    return None if None in digests else True


def _identity(run: Run) -> str:
    """Return what copies of one run share and no other run has."""
    facts = [run.summary.provenance.get(key) for key in ("started", "finished", "machine")]
    results = [run.summary.more.get(SHA), run.outcome]
    return canonical([run.method, run.summary.seed, facts, results])


def render(runs: Sequence[Run], paths: Mapping[Path, Path], format: str, width: int) -> str:
    """Return whether the machines agree, in a format of tables; `table` has at most `LINES` lines.

    Raises:
        UsageError: see `rows`.
    """
    places, common = rows(runs, paths)
    if format == "json":
        return json_text(
            [{**row, "machines": [_name(places[n - 1]) for n in row["places"]]} for row in common]
        )
    if format == "csv":
        return csv_text(common)
    agree = sum(row["agree"] is True for row in common)
    differ = sum(row["agree"] is False for row in common)
    answer = (
        f"{counted(len(common), 'run')} made on more than one of {len(places)} machines: {agree} "
        f"with equal final parameters, {differ} with different ones, "
        f"{len(common) - agree - differ} without a digest."
    )
    machines = [
        Column("machine", [str(number) for number in range(1, len(places) + 1)]),
        *(Column(name, [getattr(place, name) for place in places]) for name in Place._fields),
    ]
    table = _per_method(common)
    if format != "table":
        return "\n\n".join(
            [
                sentence(answer, format, width),
                block("Machines", machines, 2, format, width),
                block("Runs in common", table, 1, format, width),
            ]
        )
    answer = sentence(answer, format, width)
    above = fitted(machines[:2], machines[2:], width, LINES // 2).text
    left = LINES - len(f"{answer}\n\n{above}".splitlines()) - 4
    below = fitted(table[:1], table[1:], width, left)
    hidden = len(table[0].cells) - below.rows
    notes = [f"Not shown: {counted(hidden, 'method')}."] if hidden else []
    notes.append("Every run, with its digests: --json.")
    return cut_lines("\n\n".join([answer, above, below.text, " ".join(notes)]))


def _name(place: Place) -> str:
    return f"{place.system}, torch {place.torch} ({place.path})"


def _per_method(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the counts of each method, those with differences first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(canonical([row["task"], row["method"]]), []).append(row)
    ordered = sorted(groups.values(), key=lambda group: all(row["agree"] for row in group))
    values = [
        {
            "method": group[0]["method"],
            "task": group[0]["task"],
            "runs": len(group),
            "equal": sum(row["agree"] is True for row in group),
            "different": sum(row["agree"] is False for row in group),
            "equal results": sum(row["same_result"] for row in group),
            "seeds": ",".join(str(seed) for seed in sorted({row["seed"] for row in group})),
        }
        for group in ordered
    ]
    return [
        Column(name.replace(" ", "\n"), [str(row[name]) for row in values]) for name in values[0]
    ]
