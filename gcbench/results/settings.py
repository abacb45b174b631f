"""The settings of a run: each field is the one declaration of a setting.

A field has the type, default and bounds that `gcbench.training.configuration.Config` checks. The
flag of `gcbench run`, its help text and its place there follow from it, as do the hash of a run,
what a baseline may differ in, and how a table names the setting.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, strict=True)]  # strict: neither true nor "8"
NotNegative = Annotated[int, Field(ge=0, strict=True)]
Finite = Annotated[float, Field(allow_inf_nan=False, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Share = Annotated[Finite, Field(ge=0, lt=1)]
PositiveFloat = Annotated[Finite, Field(gt=0)]
NotNegativeFloat = Annotated[Finite, Field(ge=0)]

COMPARED = "What is compared"
TRAINING = "Training (the task's defaults unless given)"
PLACE = "Where it runs"
Role = Literal["budget", "tuned", "method", "place"]
"""What a setting is in a comparison.

"budget": a row and its baseline agree in it; "tuned": the same, but a method may need another value
than its baseline; "method": a part of the method; "place": where and how the run was made."""


def setting(
    default: Any,
    help: str,
    panel: str = "",
    role: Role = "budget",
    *,
    changes_fp32: bool = False,
    bare: bool = False,
    flag: str = "",
) -> Any:
    """Return a field of `Settings`.

    `default`: `...` where the task or the method has it. `help`: a sentence for the flag's help;
    without a `panel` of it the setting has no flag. `changes_fp32`: an uncompressed run ends
    elsewhere with another value. `bare`: a label has the value without the setting's name. `flag`:
    the flag, if it is not the setting's name.
    """
    extra: dict[str, Any] = {
        "panel": panel,
        "role": role,
        "changes_fp32": changes_fp32,
        "bare": bare,
        "flag": flag,
    }
    return Field(default, description=help, json_schema_extra=extra)


def _by_rank(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("expected RANK:FACTOR, e.g. 2:1.5, or several, 2:1.5/3:2")  # noqa: TRY004
    return value


class Settings(BaseModel):
    """All settings that decide a run's results; equal ones have equal hashes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str = setting("digits", "Task; see `gcbench list tasks`.", COMPARED)
    task_options: dict[str, Any] = setting(
        {}, "A task's field, e.g. network=resnet20.", COMPARED, flag="--task-set"
    )
    compressor: str = setting(
        "terngrad",
        "Compressor(s), with fields after colons, or files: topk:ratio=0.05,./mine.py.",
        COMPARED,
        "method",
    )
    options: dict[str, Any] = setting(
        {},
        "A compressor's field, e.g. clip=2.0; by step: ratio=0:0.25/100:0.01.",
        COMPARED,
        "method",
        flag="--set",
    )
    workers: Positive = setting(4, "Number of workers. Under torchrun: its processes.", COMPARED)
    engine: Literal["simulate", "spawn", "torchrun", "ddp"] = setting(
        "simulate", "simulate, spawn or ddp; torchrun is detected.", COMPARED, "place", bare=True
    )
    hook: Literal["gcbench", "torch"] = setting(
        "gcbench",
        "With --engine ddp: gcbench, or torch for torch's own hook of this method.",
        COMPARED,
        "place",
    )
    bucket_mb: PositiveFloat = setting(
        25.0, "With --engine ddp: MiB of fp32 gradients in a bucket.", COMPARED, "place"
    )
    collective: str = setting(
        ...,
        "allreduce, allgather, twoshot, ring or sparse. Default: the method's.",
        COMPARED,
        "method",
    )
    memory: str = setting(
        "none",
        "none, residual, momentum, dgc, ef21, loco, or a file. Default: the method's.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    memory_options: dict[str, Any] = setting(
        {},
        "A memory's field, e.g. decay=0.9.",
        COMPARED,
        "method",
        changes_fp32=True,
        flag="--memory-set",
    )
    start_step: NotNegative = setting(
        0,
        "First step that is compressed; earlier ones are exchanged in fp32.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    delay: NotNegative = setting(
        0,
        "1: apply each mean one step late (double buffering). With local steps: steps until the "
        "workers apply it.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    rebroadcast_every: NotNegative = setting(
        0,
        "Steps between broadcasts of worker 0's parameters; 0: none.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    local_steps: NotNegative = setting(
        0,
        "Optimizer steps of each worker before the difference of parameters is exchanged; 0: "
        "gradients at every step.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    fragments: Positive = setting(
        1,
        "With local steps: parts of the model that are exchanged in turn (Streaming DiLoCo).",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    blend: Share = setting(
        0.0,
        "With local steps: share of a worker's own parameters that stays at each exchange.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    outer_lr: PositiveFloat = setting(
        1.0,
        "Learning rate of the outer step; 1: plain averaging. DiLoCo: 0.7.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    outer_momentum: Share = setting(
        0.0, "Momentum of the outer step. DiLoCo: 0.9.", COMPARED, "method", changes_fp32=True
    )
    outer_nesterov: Flag = setting(
        False,
        "Nesterov momentum in the outer step, as in DiLoCo.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    dense_last: Flag = setting(
        False,
        "Exchange the last (classifier) layer in fp32. Default: the task's.",
        COMPARED,
        "method",
    )
    dense_below: NotNegative = setting(
        0, "Exchange tensors below this many elements in fp32.", COMPARED, "method"
    )
    trim: NotNegative = setting(
        0,
        "Trimmed mean: leave out the N largest and N smallest values of each element.",
        COMPARED,
        "method",
        changes_fp32=True,
    )
    adversaries: NotNegative = setting(
        0, "Workers that send an attack: the last N ranks.", COMPARED, changes_fp32=True
    )
    attack: Literal["flip", "random", "scale"] = setting(
        "flip",
        "flip: -g; random: each element times a number in [-1, 1); scale: -100 g.",
        COMPARED,
        changes_fp32=True,
    )
    gradients: Literal["loop", "batched"] = setting(
        "loop",
        "loop: worker by worker; batched: one pass for all.",
        PLACE,
        "place",
        bare=True,
    )
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = setting(
        0, "Seed(s).", COMPARED, "method"
    )
    holdout: NotNegative = setting(
        0, "Training examples held out for validation, the same for every seed.", TRAINING
    )
    test: Flag = setting(
        True, "Evaluate the test split, too; with --holdout after the last step only.", TRAINING
    )
    task_version: Positive = setting(1, "Version of the task's definition.")
    steps: Positive = setting(..., "Training steps.", TRAINING)
    batch: Positive = setting(..., "Examples per step, over all workers.", TRAINING)
    optimizer: Literal["sgd", "adam", "adamw", "muon"] = setting(
        "sgd",
        "sgd, adam, adamw, or muon with adamw for all but hidden matrices; applied to the mean.",
        TRAINING,
        "tuned",
    )
    lr: PositiveFloat = setting(..., "Learning rate.", TRAINING, "tuned")
    momentum: Share = setting(0.0, "Momentum of sgd or muon.", TRAINING, "tuned")
    nesterov: Flag = setting(False, "Nesterov momentum.", TRAINING, "tuned")
    betas: tuple[Share, Share] = setting(
        (0.9, 0.999), "Adam's betas, e.g. 0.9/0.999.", TRAINING, "tuned"
    )
    eps: NotNegativeFloat = setting(1e-8, "Adam's epsilon.", TRAINING, "tuned")
    schedule: Literal["constant", "poly", "step", "cosine"] = setting(
        "constant", "constant, poly, step or cosine.", TRAINING, "tuned"
    )
    schedule_power: PositiveFloat = setting(0.5, "Power of poly.", TRAINING, "tuned")
    schedule_steps: list[PositiveFloat] = setting(
        [], "Milestones of step: 500/750, or 0.5/0.75 of all.", TRAINING, "tuned"
    )
    schedule_gamma: PositiveFloat = setting(0.1, "Factor at each milestone.", TRAINING, "tuned")
    schedule_floor: Share = setting(
        0.0, "Last rate of cosine, as a share of the first.", TRAINING, "tuned"
    )
    warmup: NotNegativeFloat = setting(
        0.0, "Steps of linear warm-up; below 1: a fraction of all steps.", TRAINING, "tuned"
    )
    weight_decay: NotNegativeFloat = setting(0.0, "L2 factor.", TRAINING, "tuned")
    decay: Literal["loss", "update"] = setting(
        "loss",
        "Where weight decay is added. loss: before compression; update: after decoding.",
        TRAINING,
        "tuned",
    )
    clip_norm: NotNegativeFloat = setting(
        0.0, "Largest 2-norm of the gradient that is applied; 0: no limit.", TRAINING, "tuned"
    )
    ema: Share = setting(
        0.0, "Evaluate a moving average of the parameters with this decay; 0: off.", TRAINING
    )
    eval_every: NotNegative = setting(
        0, "Steps between evaluations; 0: only at the end.", TRAINING, "place"
    )
    log_every: Positive = setting(10, "Steps between records.", TRAINING, "place")
    device: str = setting("cpu", "cpu or cuda.", PLACE, "place", bare=True)
    backend: str = setting("auto", "auto, reference, cpu or cuda.", PLACE, "place", bare=True)
    threads: Positive | None = setting(
        None,
        "Threads per worker. Default: cores/workers. Results depend on it.",
        PLACE,
        "place",
    )
    straggler: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[Finite, Field(ge=1)]],
        BeforeValidator(_by_rank),
    ] = setting(
        {},
        "RANK:FACTOR, e.g. 2:1.5: this worker takes FACTOR times as long for its gradients.",
        PLACE,
        "place",
    )
    on_nonfinite: Literal["stop", "skip"] = setting(
        "stop", "stop or skip at a NaN gradient.", TRAINING, "place"
    )
    link_gbit: PositiveFloat = setting(
        10.0, "Gbit/s of the link that communication is modelled for.", PLACE, "place"
    )
    link_latency_us: NotNegativeFloat = setting(
        50.0, "Latency of that link in microseconds.", PLACE, "place"
    )


_FIELDS = Settings.model_fields
_EXTRA: dict[str, Any] = {name: field.json_schema_extra for name, field in _FIELDS.items()}
DEFAULTS: dict[str, Any] = json.loads(
    json.dumps({name: f.default for name, f in _FIELDS.items() if not f.is_required()})
)
"""Defaults as JSON; a stored config without a setting has its default."""
ROLES: dict[str, Role] = {name: extra["role"] for name, extra in _EXTRA.items()}
CHANGES_FP32 = frozenset(name for name, extra in _EXTRA.items() if extra["changes_fp32"])
"""Settings with which an uncompressed run ends elsewhere."""
BARE = frozenset(name for name, extra in _EXTRA.items() if extra["bare"])
"""Settings of which a label has the value alone."""
SET_FLAGS = {name: e["flag"] for name, e in _EXTRA.items() if e["flag"].endswith("set")}
"""Settings that are mappings -> the flags that set one of their entries."""
TUNED_KEYS = frozenset(name for name, role in ROLES.items() if role == "tuned")
"""Settings of which a method may need other values than its baseline (signs need a small learning
rate): where no baseline has a row's values, the best of the other baselines is taken, and the table
marks it."""
METHOD_KEYS = frozenset(name for name, role in ROLES.items() if role in ("method", "place"))
"""Settings in which a row and its baseline may differ; all the others are the budget."""
