"""Bundles: the rows of runs, the sources of their plug-ins and the environment, in one zip file.

A bundle holds `bundle.json` (schema, versions, and the SHA-256 of every other file), `rows.parquet`
(`gcbench.results.rows`), `environment.json` and `sources/`. Reading one extracts the rows alone:
sources are there for people to read, and gcbench never runs them.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import io
import json
import shlex
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from gcbench.core import files
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.core.writing import write_atomically
from gcbench.results import rows as rowfiles
from gcbench.results import sanitize
from gcbench.results.reader import Run

SCHEMA = 1
HEAD, ROWS, ENVIRONMENT, SOURCES = "bundle.json", "rows.parquet", "environment.json", "sources/"
MOST_BYTES = 1 << 28
"""Bytes that the files of a bundle may have together, unpacked."""
MOST_FILES = 10_000
EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every file in a bundle, so that equal rows give equal bytes."""


# ---- writing -------------------------------------------------------------------------------------


def write(path: Path, runs: Sequence[Run], paths: Sequence[Path]) -> dict[str, int]:
    """Write a bundle of these runs, and return how many rows, sources and bytes it has.

    `given`: files and folders in which sources of plug-ins are looked for, after the files that the
    runs' commands name and the installed packages.

    Raises:
        UsageError: `path` does not end in .zip, or a plug-in's source is not found.
        GcbenchError: evaluations cannot be read, or the file cannot be written.
    """
    check(path)
    contents = {f"{SOURCES}{name}": data for name, data in _sources(runs, paths).items()}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / ROWS
        rowfiles.write(place, [_row(run) for run in runs])
        contents[ROWS] = place.read_bytes()
    contents[ENVIRONMENT] = _json(_environment())
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(contents.items())}
    head = files.sealed({"schema": SCHEMA, "rows": len(runs), files.FILES: digests})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in sorted({**contents, HEAD: _json(head)}.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)
    write_atomically(path, buffer.getvalue())
    return {"rows": len(runs), "sources": len(contents) - 2, "bytes": len(buffer.getvalue())}


def check(path: Path) -> None:
    """Refuse a path to which no bundle can be written.

    Raises:
        UsageError: the ending is not .zip, or the folder does not exist.
    """
    if path.suffix != ".zip":
        raise UsageError(f"{path}: a bundle's name ends in .zip, e.g. -o runs.zip")
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder; create it, or name another file")


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _row(run: Run) -> dict[str, Any]:
    """Return the row of a run with the keys that its summary has."""
    every = run.summary.model_dump()
    summary = {key: every[key] for key in every if key in run.summary.present}
    return rowfiles.row(summary, run.evaluations(), run.suite)


def _environment() -> dict[str, Any]:
    """Return versions, machine and installed packages of the machine that writes the bundle."""
    from gcbench.training import configuration

    installed = importlib.metadata.distributions()
    return {
        "versions": configuration.versions(),
        "machine": configuration.machine(),
        "commit": configuration.commit(),
        "packages": sorted({f"{one.name}=={one.version}" for one in installed}),
    }


def _sources(runs: Sequence[Run], paths: Sequence[Path]) -> dict[str, bytes]:
    """Return the sources of the runs' plug-ins: their names below `sources/`, and their bytes."""
    wanted: dict[str, str] = {}
    commands: dict[str, None] = {}
    for run in runs:
        plugins = run.summary.provenance.get("plugins") or {}
        for kind, origin in plugins.items():
            if isinstance(origin, Mapping) and origin.get("sha256"):
                name = getattr(run.summary, "compressor_name" if kind == "compressor" else "task")
                title = f"{kind} {origin.get('distribution') or name}"
                wanted.setdefault(str(origin["sha256"]), title)
        commands.setdefault(str(run.summary.provenance.get("command") or ""))
    if missing := [str(path) for path in paths if not path.exists()]:
        raise UsageError(f"--source {missing[0]}: no such file or folder; name one that exists")
    sources: dict[str, bytes] = {}
    candidates = list(_candidates(commands, wanted.values(), paths)) if wanted else []
    for digest, title in wanted.items():
        match = next((one for one in candidates if _digest(one) == digest), None)
        if match is None:
            raise UsageError(
                f"the source of {title} (digest {digest[:10]}) is not found, or was edited since: "
                "name its file or folder with --source"
            )
        sources |= {f"{digest[:10]}/{name}": data for name, data in match.items()}
    for path in paths:
        if not any(_digest(one) in wanted for one in _of_place(path)):
            raise UsageError(
                f"--source {path}: the source of no plug-in of these runs; name the file or the "
                "package that they were made with, or leave the flag out"
            )
    return sources


def _candidates(
    commands: Iterable[str], titles: Iterable[str], paths: Sequence[Path]
) -> Iterator[dict[str, bytes]]:
    """Yield the sources that may be a plug-in's: of a file, or of a package by relative name."""
    places = [*paths]
    for command in commands:
        with suppress(ValueError):
            for word in shlex.split(command):
                pieces = [piece.split(":")[0] for piece in word.split(",")]
                places += [Path(piece) for piece in pieces if piece.endswith(".py")]
    distributions = {title.split(" ", 1)[1] for title in titles}
    groups = ("gcbench.compressors", "gcbench.memories", "gcbench.tasks")
    for point in (one for group in groups for one in importlib.metadata.entry_points(group=group)):
        if (point.dist.name if point.dist else point.value) in distributions:
            spec = importlib.util.find_spec(point.module.partition(".")[0])
            if spec is not None:
                folders = spec.submodule_search_locations or [spec.origin or ""]
                places += map(Path, filter(None, folders))
    for place in dict.fromkeys(places):
        yield from _of_place(place)


def _of_place(place: Path) -> Iterator[dict[str, bytes]]:
    """Yield the sources of a file; of a folder as a package, and of each file in it."""
    if place.is_file():
        yield {place.name: files.read_bytes(place)}
    elif place.is_dir():
        every = sorted(path for path in place.rglob("*.py") if path.is_file())
        yield {path.relative_to(place).as_posix(): files.read_bytes(path) for path in every}
        yield from ({path.name: files.read_bytes(path)} for path in every)


def _digest(sources: Mapping[str, bytes]) -> str:
    """Return the digest of a plug-in's sources as `registry.origin` computes it."""
    total = hashlib.sha256()
    for name in sorted(sources, key=PurePosixPath):
        total.update(f"{name}\0".encode() + hashlib.sha256(sources[name]).digest())
    return total.hexdigest()


# ---- reading -------------------------------------------------------------------------------------


@contextmanager
def opened(places: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the places with the rows of bundles, extracted for the time being, in their stead.

    Raises:
        GcbenchError: a bundle is damaged, unsafe or of another schema.
    """
    with tempfile.TemporaryDirectory(prefix="gcbench-") as scratch:
        result = []
        for number, place in enumerate(places):
            files.check_regular(place)
            if place.suffix != ".zip" or not place.is_file():
                result.append(place)
                continue
            target = Path(scratch) / str(number) / f"{place.name}.parquet"
            target.parent.mkdir()
            target.write_bytes(read(place)[ROWS])
            result.append(target)
        yield result


def read(path: Path) -> dict[str, bytes]:
    """Return the files of a bundle by name, after all were checked; nothing is written or run.

    Raises:
        GcbenchError: it is damaged, unsafe or of another schema.
    """
    remedy = "Get it again from its author, or write it again with `gcbench bundle`"
    try:
        with zipfile.ZipFile(io.BytesIO(files.read_bytes(path))) as archive:
            members = archive.infolist()
            if fault := _unsafe(members):
                raise GcbenchError(f"{path}: {fault}. {remedy}")
            contents = {one.filename: archive.read(one) for one in members}
            head = json.loads(contents.pop(HEAD))
    except KeyError:
        raise GcbenchError(f"{path} is a zip file without {HEAD}, not a bundle. {remedy}") from None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, RuntimeError) as error:
        raise GcbenchError(f"{path} cannot be read as a bundle ({error}). {remedy}") from None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        schema = head.get("schema") if isinstance(head, dict) else None
        raise GcbenchError(f"{path}: schema {schema!r}, but this gcbench reads {SCHEMA}. {remedy}")
    files.check_digest(head, f"{path}, {HEAD}", remedy)
    listed = head.get(files.FILES)
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    if listed != digests or ROWS not in digests:
        every = {*digests, *(listed if isinstance(listed, dict) else ()), ROWS}
        expected = listed if isinstance(listed, dict) else {}
        wrong = sorted(n for n in every if n not in digests or expected.get(n) != digests[n])
        names = sanitize.printable(", ".join(wrong[:3]))
        raise GcbenchError(f"{path}: {names} missing, added or changed. {remedy}")
    return contents


def _unsafe(members: Sequence[zipfile.ZipInfo]) -> str:
    """Return why the files of an archive are not read; "" if they are those of a bundle."""
    if len(members) > MOST_FILES:
        return f"{len(members):,} files; at most {MOST_FILES:,} are read"
    if (size := sum(one.file_size for one in members)) > MOST_BYTES:
        return f"{size:,} bytes unpacked; at most {MOST_BYTES:,} are read"
    names = [one.filename for one in members]
    if len(set(names)) < len(names):
        return "two files of one name"
    for one in members:
        name = sanitize.printable(one.filename)
        parts = one.filename.split("/")
        inside = one.filename in (HEAD, ROWS, ENVIRONMENT) or one.filename.startswith(SOURCES)
        if not inside or "\\" in one.filename or {"", ".", ".."} & {*parts}:
            return f"{name!r} is not the name of a file of a bundle"
        if stat.S_IFMT(one.external_attr >> 16) not in (0, stat.S_IFREG):
            return f"{name!r} is not a regular file"
        if one.flag_bits & 1:
            return f"{name!r} is encrypted"
        if one.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            return (
                f"{name!r} is compressed by method {one.compress_type} of zip; stored and deflated "
                "files are read"
            )
    return ""
