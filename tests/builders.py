"""What several tests build."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor

from gcbench.core import codec, registry
from gcbench.core.compressor import Compressor, Context, Key, Payload, Segments, cuttable
from gcbench.core.files import FILES, hash_file, sealed
from gcbench.training.configuration import Config


def encode_shards(
    method: Compressor,
    x: Tensor,
    segments: Segments,
    shared: Tensor,
    key: Key,
    bounds: Sequence[int],
) -> list[Payload]:
    """Return a worker's payload of each shard `[bounds[k], bounds[k + 1])`, as in a two-shot."""
    if cuttable(method):
        return method.cut(codec.encode(method, x, Context(segments, shared, key)), bounds)
    payloads = []
    for start, stop in pairwise(bounds):
        shard, which = segments.shard(start, stop)
        scales = shared[which.start : which.stop] if shared.numel() else shared
        place = key._replace(offset=key.offset + start)
        payloads.append(codec.encode(method, x[start:stop], Context(shard, scales, place)))
    return payloads


# ---- finished runs on disk


def summary(name: str = "none", seed: int = 0, accuracy: float | None = 0.5, **over: Any) -> Any:
    """Return a finished run's summary; `over` replaces fields, and keys of the config."""
    config = {
        "task": "digits",
        "task_options": {},
        "compressor": name,
        "options": {},
        "workers": 2,
        "engine": "simulate",
        "collective": "allreduce",
        "gradients": "loop",
        "seed": seed,
        "steps": 100,
        "batch": 32,
        "lr": 0.1,
        "dense_last": False,
        "log_every": 10,
    }
    config |= {key: value for key, value in over.items() if key in config}
    fields = {
        "schema": 1,
        "compressor": f"{name.title()}()",
        "compressor_name": name,
        "test_accuracy": accuracy,
        "test_loss": 0.25,
        "test_examples": 10_000,
        "train_loss": 0.2,
        "params": 1000,
        "payload_bytes_up": 40_000_000,
        "payload_bytes_down": 10_000_000,
        "wire_bytes": {"per_worker": 75_000_000, "total": 150_000_000},
        "nominal_ratio": 16.0,
        "payload_ratio_up": 15.5,
        "payload_ratio_down": 8.0,
        "phase_seconds": {
            "forward_backward": 0.02,
            "statistic": None,
            "encode": 0.003,
            "communicate": None,
            "decode": 0.001,
            "update": 0.0005,
        },
        "communicate_modelled": {"seconds": 0.00125, "link_gbit": 10.0, "link_latency_us": 50.0},
        "step_seconds": 0.05,
        "config_hash": f"{name}{seed}",
        "skipped_steps": 0,
        "provenance": {"commit": "abc", "machine": {"cpu": "some"}},
    }
    selected = ("task", "workers", "collective", "engine", "gradients", "seed", "steps", "batch")
    fields |= {key: config[key] for key in selected}
    return (
        fields | {key: value for key, value in over.items() if key in fields} | {"config": config}
    )


def summary_of(config: Config, **over: Any) -> dict[str, Any]:
    """Return what a run of this config might report; `over` adds or replaces fields."""
    shown = ("task", "workers", "collective", "engine", "gradients", "steps", "batch", "seed")
    return {
        "schema": 1,
        **{key: getattr(config, key) for key in shown},
        "compressor": registry.call(config.make_compressor()),
        "compressor_name": config.compressor,
        **{"payload_bytes_up": 8.0, "payload_bytes_down": 8.0, "wire_bytes": {"per_worker": 8.0}},
        "config": config.model_dump(mode="json"),
        **over,
    }


def write(folder: Path, *summaries: Any) -> Path:
    """Write each summary as a finished run below `folder`."""
    for place, one in enumerate(summaries):
        run = folder / f"{one['task']}-{one['compressor_name']}-{place}"
        run.mkdir(parents=True)
        (run / "config.json").write_text(json.dumps(one["config"]))
        evaluations = [
            {"kind": "eval", "step": s, "test_accuracy": 0.9 - 1 / s, "test_loss": 1 / s}
            for s in range(10, 101, 10)
        ]
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, evaluations)))
        listed = {name: hash_file(run / name) for name in ("config.json", "metrics.jsonl")}
        (run / "summary.json").write_text(json.dumps(sealed({**one, FILES: listed})))
    return folder


def reseal(path: Path, **changes: Any) -> None:
    """Change fields of a summary.json on purpose: its digest fits afterwards."""
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), **changes})))


BASE = [summary("none", seed, value) for seed, value in enumerate((0.90, 0.92, 0.94))]
"""Uncompressed runs of three seeds."""
