"""Whether a stored run of the same settings may be resumed, or counts as finished, here and now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gcbench.core.errors import GcbenchError
from gcbench.core.values import text
from gcbench.training import configuration
from gcbench.training.configuration import Config


def other_source(config: Config, run: Mapping[str, Any]) -> str:
    """Return a suffix for messages if a stored run used another version of its method's file.

    Its results may be different or the same: a changed comment also changes the file. `run`: its
    summary, or its provenance under that key.
    """
    then, now = (run.get("provenance") or {}).get("source"), configuration.source(config)
    if not (then and now) or then == now:
        return ""
    return f", made by another version of {config.compressor}.py ({then} in the run, {now} now)"


def _origin(origin: Mapping[str, str] | None) -> str:
    if origin is None:
        return "no recorded origin"
    name = " ".join(filter(None, (origin["distribution"], origin["version"])))
    return f"{name} (source {origin['sha256'][:10]})"


def check_objects(
    config: Config, run: Mapping[str, Any], folder: Path, data_dir: Path | None = None
) -> None:
    """Refuse a stored run of this config if defaults, a plug-in, or its data have changed since.

    `run`: its summary, or an unfinished run's provenance under that key. `folder`: its folder, or
    the file with its row. `data_dir`: the folder that its task reads now.

    Raises:
        GcbenchError: the same config would or might give another result now.
    """
    place = "--rows file" if folder.is_file() else "--results folder"
    remedy = f"Use --force to run it again, or another {place} to keep both"
    current = config.model_dump(mode="json")
    for key, then in run.get("config", {}).items():
        if (now := current.get(key)) != then:
            raise GcbenchError(
                f"{folder} was made with {key}={text(then)}; the same command now means "
                f"{key}={text(now)}. {remedy}"
            )
    provenance = run.get("provenance") or {}
    there = provenance.get("objects") or {}
    for kind, now in configuration.objects(config).items():
        then = there.get(kind, "unknown fields")
        if then != now:
            old, new = (" / ".join(v) if isinstance(v, list) else v for v in (then, now))
            raise GcbenchError(
                f"{folder} was made with {old}; the same command now means {new}. {remedy}"
            )
    before = provenance.get("plugins") or {}
    for kind, present in configuration.plugins(config).items():
        if before.get(kind) != present:
            raise GcbenchError(
                f"{folder} was made with another {kind}: {_origin(before.get(kind))} in the run, "
                f"{_origin(present)} now. {remedy}"
            )
    if recorded := provenance.get("data"):
        data = config.make_task().fingerprint(data_dir)
        if data != recorded:
            raise GcbenchError(
                f"{folder} was made with other data than --data-dir {data_dir} has now: digest "
                f"{text(recorded):.10} in the run, {data:.10} now. Use the former --data-dir with "
                f"the same files. Or {remedy[0].lower()}{remedy[1:]}"
            )


def threads_to_resume(config: Config, run: Mapping[str, Any], folder: Path) -> int:
    """Return the number of threads per worker with which a stored run started.

    The bits of its result depend on it, on torch, on the instruction set, and on the processor, for
    which math libraries choose among their kernels. `run`: its provenance.

    Raises:
        GcbenchError: one of the others differs here, or is not recorded in the run.
    """
    there, here = run.get("machine") or {}, configuration.machine()
    processor = "cpu" if config.device.partition(":")[0] == "cpu" else "gpu"
    then = {
        "torch": (run.get("versions") or {}).get("torch"),
        "instruction set": there.get("isa"),
        "processor": there.get(processor),
    }
    now = {
        "torch": configuration.versions()["torch"],
        "instruction set": here["isa"],
        "processor": here[processor],
    }
    apart = [
        f"{name} {then[name]} in the run, {now[name]} here"
        for name in now
        if then[name] != now[name]
    ]
    threads = run.get("threads")
    if type(threads) is not int or threads < 1:
        apart.append(f"threads {threads!r} in the run")
    if apart:
        raise GcbenchError(
            f"{folder} was started with a different torch or CPU ({'; '.join(apart)}), so resuming "
            "it here would not be reproducible. Resume it there, or start over with --force"
        )
    return int(run["threads"])
