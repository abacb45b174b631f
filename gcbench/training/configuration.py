"""The config of a run, validated and hashed; and its provenance: where and with what it ran."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator, model_validator

from gcbench import ops
from gcbench.core import memory, registry, rule, schedule
from gcbench.core.compressor import Compressor, Segments
from gcbench.core.errors import DivergedError, GcbenchError, UsageError, unknown
from gcbench.core.exchange import check_legal, check_trim
from gcbench.core.fragments import Rounds
from gcbench.core.memory import Memory
from gcbench.core.task import Task
from gcbench.results.run_folder import RunFolder
from gcbench.results.schema import SCHEMA
from gcbench.results.settings import DEFAULTS, SET_FLAGS, Settings
from gcbench.training import limits, rank


class Config(Settings):
    """The settings of a run, checked together; equal configs have equal hashes.

    Created by `Config.make`, which fills in missing hyper-parameters from the task.
    """

    @classmethod
    def make(cls, settings: Mapping[str, Any]) -> Config:
        """Return the config for the user's settings, by name.

        Missing settings have the values of the method's recipe, or else the task's defaults.

        Raises:
            UsageError: an unknown key or name, a value out of range, an illegal combination.
        """
        for key in settings:
            if key not in cls.model_fields:
                raise unknown("setting", key, cls.model_fields)
        task_options = settings.get("task_options") or {}
        task = registry.task(settings.get("task", "digits"), **task_options)
        if settings.get("task_version", task.version) != task.version:
            raise UsageError(
                f"task_version {settings['task_version']!r}: this gcbench has version "
                f"{task.version} of task {task.name}; leave the setting out"
            )
        name = settings.get("compressor", "terngrad")
        options = settings.get("options") or {}
        options = {key: schedule.normalize(key, value) for key, value in options.items()}
        stages = {
            start: registry.compressor(name, **schedule.at(options, start))
            for start in schedule.starts(options)
        }
        wanted = {**task.defaults(), **settings}
        last = stages[schedule.last(stages, wanted["steps"])]
        recipe = dict(last.recipe)
        if wanted.get("local_steps"):  # its directions go to the outer step, not to the optimizer
            recipe = {key: value for key, value in recipe.items() if key not in OF_OPTIMIZER}
        values = {**task.defaults(), **recipe, **settings}
        values["task_version"] = task.version
        values["task_options"] = {key: getattr(task, key) for key in task_options}
        if values.get("optimizer") == "muon":
            values |= {**MUON, **settings}
        # With the method's types, so that clip=2 and clip=2.0 are one config.
        values["options"] = {
            key: {start: getattr(stages[start], key) for start in value}
            if isinstance(value, Mapping)
            else getattr(stages[0], key)
            for key, value in options.items()
        }
        collective = values.get("collective")
        collective = None if collective == "auto" else collective
        memory_name: Any = values.get("memory")
        for method in stages.values():
            collective = values["collective"] = check_legal(method, collective)
            memory_name = values["memory"] = (
                method.memory if memory_name in (None, "auto") else memory_name
            )
            memory.check_legal(memory_name, method)
            Segments.of([(1,)], method.granularity)
        defaults = memory.defaults(str(memory_name), [*stages.values()])
        memory_options = {**defaults, **(values.get("memory_options") or {})}
        chosen = memory.make(memory_name, memory_options)
        values["memory_options"] = {key: getattr(chosen, key) for key in memory_options}
        for method in stages.values():
            memory.check_masking(str(memory_name), chosen, method)
            memory.check_shared(str(memory_name), chosen, method)
            rule.check_legal(method.rule, chosen, values.get("start_step") or 0, method)
        if values.get("local_steps"):
            _check_local_steps(last, str(memory_name), chosen, settings)
        if not last.rule.plain:
            _leave_update_to_rule(last, values, settings)
        if chosen.has_momentum:
            _leave_momentum_to_memory(str(memory_name), values, settings)
        place = str(values.get("device", "cpu")).partition(":")[0]
        ops.choose(str(values.get("backend", "auto")), place)
        try:
            return cls(**values)
        except ValidationError as error:
            raise UsageError(_one_line(error)) from None

    @field_validator("options")
    @classmethod
    def _steps_are_numbers(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {key: schedule.normalize(key, item) for key, item in value.items()}

    @field_validator(*SET_FLAGS)
    @classmethod
    def _numbers_are_finite(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key, item in value.items():
            for each in item.values() if isinstance(item, Mapping) else (item,):
                if isinstance(each, float) and not math.isfinite(each):
                    raise ValueError(
                        f"{key}={each}: a run cannot record it, and its worker processes would "
                        "use None; expected a finite number"
                    )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.batch % self.workers:
            nearest = self.workers * max(1, round(self.batch / self.workers))
            raise ValueError(
                f"batch {self.batch} does not divide among {self.workers} workers; "
                f"try --batch {nearest}"
            )
        if self.gradients == "batched" and self.engine != "simulate":
            raise ValueError(
                f"gradients=batched is one pass for all simulated workers; engine {self.engine} "
                "has one worker per process: use gradients=loop"
            )
        for step in self.stages() if self.trim else ():
            way = self.make_compressor(step), self.collective, self.make_memory()
            check_trim(self.trim, *way, self.workers)
        if self.adversaries >= self.workers:
            raise ValueError(
                f"adversaries={self.adversaries} of {self.workers} workers: expected at most "
                f"{self.workers - 1}"
            )
        if self.attack != DEFAULTS["attack"] and not self.adversaries:
            raise ValueError(f"attack={self.attack} without adversaries; add --adversaries N")
        if self.straggler and max(self.straggler) >= self.workers:
            raise ValueError(
                f"straggler={self.straggler} of {self.workers} workers: expected ranks below "
                f"{self.workers}"
            )
        if self.straggler and self.gradients == "batched":
            raise ValueError("straggler with gradients=batched: expected gradients=loop")
        if not (self.test or self.holdout):
            raise ValueError("test=false disables all evaluation; add --holdout N")
        if self.local_steps:
            self._fits_local_steps()
        elif outer := [key for key in OUTER if getattr(self, key) != DEFAULTS[key]]:
            raise ValueError(f"{', '.join(outer)}: only --local-steps N has an outer step; add it")
        elif self.delay > 1:
            raise ValueError(f"delay={self.delay}: expected 0 or 1 without --local-steps N")
        if self.engine == "ddp":
            self._fits_ddp()
        elif self.hook != "gcbench" or self.bucket_mb != DEFAULTS["bucket_mb"]:
            raise ValueError("hook and bucket_mb are settings of --engine ddp; leave them out")
        if self.optimizer in ("adamw", "muon") and self.weight_decay and self.decay == "loss":
            raise ValueError(
                f"optimizer={self.optimizer} decays the parameters itself, and decay=loss adds the "
                "decay to the gradients: use decay=update, or optimizer=adam"
            )
        if self.schedule_floor and self.schedule != "cosine":
            raise ValueError(
                f"schedule_floor={self.schedule_floor:g} with schedule={self.schedule}: only "
                "schedule=cosine has a floor; leave it out"
            )
        if self.outer_nesterov and not self.outer_momentum:
            raise ValueError("outer_nesterov needs outer_momentum > 0")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs momentum > 0")
        if self.schedule == "step" and not self.schedule_steps:
            raise ValueError("schedule=step needs schedule_steps, e.g. --schedule-steps 0.5/0.75")
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup={self.warmup:g} exceeds the {self.steps} steps; give fewer, or a fraction "
                "of all steps, such as --warmup 0.1"
            )
        return self

    def _fits_local_steps(self) -> None:
        """Refuse settings that are incompatible with local steps."""
        if self.rebroadcast_every:
            raise ValueError(
                "rebroadcast_every with local_steps: inside a round the workers' parameters "
                "differ; leave one of them out"
            )
        self.rounds.check("local_steps")
        if self.gradients == "batched":
            raise ValueError(
                "gradients=batched is one pass over common parameters, but with local_steps they "
                "differ between workers: use gradients=loop"
            )
        if self.on_nonfinite == "skip":
            raise ValueError(
                "on_nonfinite=skip needs an agreement at every step, but with local_steps workers "
                "communicate only at the end of a round: use on_nonfinite=stop"
            )

    def _fits_ddp(self) -> None:
        """Refuse settings that DistributedDataParallel, or the hook, does not support."""
        if self.workers < 2:
            raise ValueError("engine ddp with one worker has nothing to exchange: use --workers 2")
        if self.on_nonfinite == "skip":
            raise ValueError(
                "on_nonfinite=skip: engine ddp sends buckets before the whole gradient is known, "
                "so it cannot skip a step; use on_nonfinite=stop"
            )
        alone = ("local_steps", "delay", "rebroadcast_every", "trim", "adversaries", "straggler")
        beyond = [key for key in alone if getattr(self, key)]
        if len(schedule.starts(self.options)) > 1:
            beyond.append("a schedule of the compressor's fields")
        if beyond:
            raise ValueError(
                f"{', '.join(beyond)}: engine ddp exchanges the gradients of every backward pass "
                "by one configuration; use --engine spawn"
            )
        if self.hook == "torch":
            if self.compressor not in TORCH_HOOKS:
                raise ValueError(
                    f"torch has no hook for {self.compressor!r}: hook=torch supports "
                    f"{', '.join(TORCH_HOOKS)}"
                )
            if self.compressor == "powersgd" and self.device == "cpu":
                raise ValueError(
                    "torch's PowerSGD hook waits for a collective in the callback of another one "
                    "and hangs on gloo; use --device cuda, or --hook gcbench"
                )
            ignored = [
                key for key in ("start_step", "dense_last", "dense_below") if getattr(self, key)
            ]
            method = self.make_compressor()
            if self.collective != method.collectives[0]:
                ignored.append("collective")
            if self.memory != method.memory:
                ignored.append("memory")
            elif self.memory_options != method.memory_options:
                ignored.append("memory_options")
            ignored += [f"options.{key}" for key in self.options if key != "rank"]
            if ignored:
                raise ValueError(
                    f"{', '.join(ignored)}: torch's hooks do not support it; use --hook gcbench"
                )

    @property
    def rounds(self) -> Rounds:
        """When parameters are exchanged with local steps."""
        return Rounds(self.local_steps, self.fragments, self.delay, self.steps)

    @property
    def hash(self) -> str:
        """Ten hex digits that identify this config, see `hash_of`."""
        return hash_of(self.model_dump(mode="json"))

    @property
    def run_name(self) -> str:
        """The run's folder name."""
        return f"{self.task}-{self.compressor}-{self.hash}"

    def make_task(self) -> Task:
        """Return the task with its fields set."""
        return registry.task(self.task, **self.task_options)

    def stages(self) -> list[int]:
        """Return the steps at which the compressor, or the value of one of its fields, changes."""
        return sorted({*schedule.starts(self.options), self.start_step})

    def make_compressor(self, step: int = 0) -> Compressor:
        """Return the compressor with its fields at `step`."""
        return registry.compressor(self.compressor, **schedule.at(self.options, step))

    def make_memory(self) -> Memory:
        """Return the memory with its fields set."""
        return memory.make(self.memory, self.memory_options)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of `step` (counted from 0).

        poly: lr (1 - step / steps)^power; step: lr gamma^(milestones reached); cosine: half a
        period from lr, at the end of the warm-up, to floor * lr at `steps`. In the first `warmup`
        steps this is multiplied by (step + 1) / warmup.
        """
        factor = 1.0
        if self.schedule == "poly":
            factor = (1 - step / self.steps) ** self.schedule_power
        elif self.schedule == "step":
            early = 1e-9 * self.steps  # .55 of 100 steps is 55.00000000000001
            reached = sum(step >= self._steps(mark) - early for mark in self.schedule_steps)
            factor = self.schedule_gamma**reached
        elif self.schedule == "cosine":
            begin = self._steps(self.warmup)
            done = max(0.0, step - begin) / max(1.0, self.steps - begin)
            factor = self.schedule_floor + (1 - self.schedule_floor) * (
                0.5 + 0.5 * math.cos(math.pi * done)
            )
        if step + 1 < self._steps(self.warmup):
            factor *= (step + 1) / self._steps(self.warmup)
        return float(self.lr * factor)

    def _steps(self, count: float) -> float:
        """Return a number of steps; a value below 1 is a fraction of all steps."""
        return count * self.steps if count < 1 else count


def hash_of(config: Mapping[str, Any]) -> str:
    """Return ten hex digits of the SHA-256 of a config's JSON, without settings at their defaults.

    So a new setting does not change hashes. `config`: a config as JSON, as it is stored.
    """
    changed = {
        key: value for key, value in config.items() if key not in DEFAULTS or DEFAULTS[key] != value
    }
    return hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()[:10]


READERS: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("momentum", "nesterov"), ("optimizer", ("sgd", "muon"))),
    **dict.fromkeys(("betas", "eps"), ("optimizer", ("adam", "adamw", "muon"))),
    "schedule_power": ("schedule", ("poly",)),
    **dict.fromkeys(("schedule_steps", "schedule_gamma"), ("schedule", ("step",))),
    **dict.fromkeys(("link_gbit", "link_latency_us"), ("engine", ("simulate",))),
}
"""Settings that only some values of another setting use: that other one, and these values."""
MUON: dict[str, Any] = {"momentum": 0.95, "nesterov": True}
"""Defaults of optimizer=muon, in place of the task's and the method's."""
TORCH_HOOKS = ("none", "fp16", "powersgd")
"""Methods with a comparable hook in torch. Its bf16 hook fails on the CPU; its quantization hooks
implement other methods, and gather their scales uncompressed."""
OF_OPTIMIZER = ("optimizer", "lr", "momentum", "nesterov", "weight_decay", "decay", "betas", "eps")
"""Settings of the optimizer that each worker runs."""
OUTER = ("outer_lr", "outer_momentum", "outer_nesterov", "fragments", "blend")
"""Settings of the outer optimizer, which applies the mean difference of parameters."""


def _check_local_steps(
    method: Compressor, name: str, carried: Memory, settings: Mapping[str, Any]
) -> None:
    """Refuse, with local steps, a memory or method that works for gradients only."""
    if carried.has_momentum:
        raise UsageError(
            f"memory {name!r} applies a momentum to gradients, and local_steps exchange "
            "differences of parameters: use --momentum (inside a round) or --outer-momentum "
            "(between rounds), and --memory residual or none"
        )
    if _needs_outer_lr(method) and "outer_lr" not in settings:
        raise UsageError(
            f"{method!r} applies directions of length 1, not a mean, and local_steps would apply "
            "them to the parameters with --outer-lr 1: set --outer-lr, such as 0.001"
        )


def _needs_outer_lr(method: Compressor) -> bool:
    """Return whether local steps with this method have no default of `outer_lr`."""
    return method.claims.aggregate != "mean"


def _leave_momentum_to_memory(
    name: str, values: dict[str, Any], settings: Mapping[str, Any]
) -> None:
    """Set the optimizer's momentum to 0, because the memory `name` applies one."""
    if settings.get("momentum"):
        raise UsageError(
            f"momentum {settings['momentum']} with memory {name!r}, which applies one: leave "
            "--momentum out, and set the memory's by --memory-set"
        )
    if values.get("optimizer", "sgd") != "sgd":
        raise UsageError(
            f"optimizer {values['optimizer']!r} would add its averages to the momentum of memory "
            f"{name!r}: use --optimizer sgd and a rate for it, --lr"
        )
    values["momentum"] = 0.0
    if "nesterov" not in settings:
        values["nesterov"] = False


def _leave_update_to_rule(
    method: Compressor, values: dict[str, Any], settings: Mapping[str, Any]
) -> None:
    """Set the (outer) optimizer to plain SGD, which applies the update rule's direction."""
    local = bool(values.get("local_steps"))
    keys = ("outer_momentum", "outer_nesterov") if local else ("momentum", "nesterov")
    wrong = [f"{key} {settings[key]}" for key in keys if settings.get(key)]
    if not local and settings.get("optimizer", "sgd") != "sgd":
        wrong.append(f"optimizer {settings['optimizer']!r}")
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} with {method!r}, which has its own update rule: leave it "
            "out, and set the fields of the method by --set"
        )
    values.update(dict.fromkeys(keys, 0.0) | {keys[1]: False})
    if not local:
        values["optimizer"] = "sgd"


def _one_line(error: ValidationError) -> str:
    problems = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        prefix = "" if not where else f"{where}={problem['input']!r}: "
        if problem["type"] == "missing":
            prefix = f"{where}: the task has no default for it; "
        problems.append(prefix + message[0].lower() + message[1:])
    return "; ".join(problems)


def commit() -> str | None:
    """Return the checkout's commit, with a + if it has `changed_files`; None without git."""
    try:
        head = _git("rev-parse", "HEAD")
        return None if head is None else head.strip() + ("+" if changed_files() else "")
    except GitError:
        return None


def changed_files() -> list[str]:
    """Return the files of the checkout that differ from its commit; [] without a checkout.

    These are tracked files, and untracked ones in the folders of sources, without the files in
    `REFERENCE`, to which runs add rows.

    Raises:
        GitError: git cannot read the checkout.
    """
    status = _git(
        *("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all"),
        *("--", ".", f":(exclude){REFERENCE}"),
    )
    files = []
    for entry in filter(None, (status or "").split("\0")):
        kind, path = entry[:2], entry[3:]
        if kind != "??" or path.split("/")[0] in SOURCES:
            files.append(path)
    return files


def require_clean(rows: Path, started: Mapping[str, Any] | None = None) -> None:
    """Refuse to add rows to a file of `REFERENCE` from a checkout with `changed_files`.

    `started`: the provenance of a run that was started before, maybe from another working tree.

    Raises:
        UsageError: the message names the files, or the commit at which the run was started, or
            states why git cannot name them.
    """
    if rows.resolve().parent != CHECKOUT / REFERENCE:
        return
    checkout = (CHECKOUT / ".git").exists()
    if checkout and started is not None and started.get("commit") is None:
        raise UsageError(
            f"--rows {rows}: reference rows need a committed checkout, and this run has no "
            "recorded commit. Add --force to run it again, or add the row to another file"
        )
    origin = str((started or {}).get("commit"))
    if origin.endswith("+"):
        raise UsageError(
            f"--rows {rows}: reference rows need a committed checkout, and this run was started "
            f"with uncommitted changes to {origin[:10]}. Add --force to run it again, or add the "
            "row to another file"
        )
    try:
        files = changed_files()
    except GitError as error:
        raise UsageError(
            f"--rows {rows}: reference rows need a committed checkout, and git cannot read "
            f"{CHECKOUT}: {error}. Make `git status` work there, or add the rows to another file"
        ) from error
    if not files:
        return
    named = ", ".join(files[:5]) + (f" and {len(files) - 5} more" if len(files) > 5 else "")
    raise UsageError(
        f"--rows {rows}: reference rows need a committed checkout, and these files differ from its "
        f"commit: {named}. Commit or remove them, or add the rows to another file"
    )


CHECKOUT = Path(__file__).resolve().parents[2]
"""The folder of the checkout, if gcbench runs from one."""
REFERENCE = "results/reference"
"""The folder of committed rows in the checkout."""
SOURCES = frozenset({"gcbench", "compressors", "tasks", "cuda"})
"""Folders of the checkout in which an untracked file may change results."""


class GitError(GcbenchError):
    """git is not installed, or refuses the checkout; the message is git's."""


def _git(*words: str) -> str | None:
    """Return git's output for the checkout; None without a checkout.

    Raises:
        GitError: git fails.
    """
    if not (CHECKOUT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(CHECKOUT), *words], capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise GitError(str(error)) from error
    except subprocess.CalledProcessError as error:
        raise GitError(" ".join(error.stderr.split())[:300]) from error
    return done.stdout


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of Python, gcbench, and packages that affect the bits of results."""
    import torch

    result = {"python": platform.python_version()}
    for package in ("gcbench", "torch", "numpy", "scikit-learn", "pillow"):
        try:
            result[package] = version(package)
        except PackageNotFoundError:
            continue
    # With the CUDA version, which package metadata may lack.
    return result | {"torch": torch.__version__}


def machine() -> dict[str, Any]:
    """Return a description of this machine: system, processor, cores, GPU."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    capability = torch.backends.cpu.get_cpu_capability()
    system = f"{platform.system()} {platform.machine()}"
    return {"system": system, "cpu": _cpu(), "isa": capability, "cores": cores(), "gpu": gpu}


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_worker(config: Config) -> int:
    """Return the number of threads per worker: the same in every local engine.

    The bits of a convolution depend on it, so it is recorded with the result.
    """
    return config.threads or max(1, cores() // config.workers)


def check_limits(config: Config) -> None:
    """Raise UsageError for a run that needs too many threads or processes for this machine."""
    limits.check_threads(threads_per_worker(config))
    if not rank.by_torchrun():  # otherwise the user started the processes
        spawned = config.engine in ("spawn", "ddp")
        limits.check_workers(config.workers, processes=spawned, cores=cores())


def provenance(config: Config, data_dir: Path | None = None) -> dict[str, Any]:
    """Return where, when and with what a run was started.

    `data_dir`: the folder that its task reads (`Task.load`).

    Raises:
        GcbenchError: the task cannot read its data.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command(config),
        "commit": commit(),
        "versions": versions(),
        "machine": machine(),
        "backend": serving(config),
        "objects": objects(config),
        **({"plugins": origins} if (origins := plugins(config)) else {}),
        **({"source": digest} if (digest := source(config)) else {}),
        **({"data": data} if (data := config.make_task().fingerprint(data_dir)) else {}),
        "threads": threads_per_worker(config),
        "python": sys.executable.rsplit("/", 1)[-1],
    }


def objects(config: Config) -> dict[str, Any]:
    """Return a config's task, compressor and memory as Python expressions with every field.

    Fields that the config lacks have the defaults of this version. The compressor is a list with
    one item per stage of its schedules.
    """
    stages = schedule.starts(config.options)
    return {
        "task": registry.call(config.make_task()),
        "compressor": [registry.call(config.make_compressor(step)) for step in stages],
        "memory": registry.call(config.make_memory()),
    }


def plugins(config: Config) -> dict[str, dict[str, str]]:
    """Return the origin of a run's task, compressor and memory, for third-party ones.

    An origin has the distribution, its version, and a digest of the source (`registry.origin`).
    """
    entries = {
        "task": registry.tasks()[config.task],
        "compressor": registry.compressors()[config.compressor],
        "memory": registry.memory_entry(config.memory),
    }
    origins = {kind: registry.origin(entry) for kind, entry in entries.items()}
    return {kind: origin for kind, origin in origins.items() if origin is not None}


def source(config: Config) -> str:
    """Return the digest of the file of a built-in compressor; "" for a third-party one."""
    if registry.origin(registry.compressors()[config.compressor]) is not None:
        return ""
    return registry.source_digest(config.compressor)


def serving(config: Config) -> str:
    """Return the backend of a run, with its version, or the reason why it has no kernels."""
    place = config.device.partition(":")[0]
    name = ops.choose(config.backend, place)
    if name == config.backend == "reference":
        return name
    detail = {backend.name: backend.detail for backend in ops.backends()}[place]
    return f"{name} ({detail})"


def command(config: Config) -> str:
    """Return the `gcbench run` command that repeats a run, without flags at their defaults."""
    task = config.make_task()
    method = config.make_compressor()
    last = config.make_compressor(max(schedule.starts(config.options)))
    usual = {
        **task.defaults(),
        **config.make_compressor(config.steps - 1).recipe,
        **(MUON if config.optimizer == "muon" else {}),
        **({"momentum": 0.0, "nesterov": False} if config.make_memory().has_momentum else {}),
        "collective": method.legal_collectives()[0],
        "memory": method.memory,
        "memory_options": method.memory_options if config.memory == method.memory else {},
        **({"outer_lr": None} if config.local_steps and _needs_outer_lr(last) else {}),
    }
    method_word = registry.spec(config.compressor)
    words = ["gcbench", "run", "--task", config.task, "--compressor", method_word]
    if config.engine == "torchrun":
        words[:1] = ["torchrun", "--nproc-per-node", str(config.workers), "-m", "gcbench"]
        usual["engine"] = "torchrun"
    for key, value in config.model_dump(mode="json").items():
        default = usual.get(key, Config.model_fields[key].default)
        default = list(default) if isinstance(default, tuple) else default
        if key in ("task", "compressor", "task_version") or value == default:
            continue
        flag = "--" + key.replace("_", "-")
        if key in SET_FLAGS:
            for name, setting in value.items():
                words += [SET_FLAGS[key], f"{name}={word(setting)}"]
        elif isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, registry.spec(value, key) if key == "memory" else word(value)]
    return shlex.join(words)


def word(value: Any) -> str:
    """Return a setting's value in the form of the command line."""
    if isinstance(value, Mapping):
        return schedule.text(value)
    if isinstance(value, list):
        return "/".join(map(str, value)) or "null"
    return "null" if value is None else str(value)


def failed(config: Config, run: RunFolder, error: DivergedError) -> dict[str, Any]:
    """Return the summary of a diverged run: no metrics, and the bytes up to its last record."""
    spent = (run.records() or [{}])[-1]
    wire = float(spent.get("wire_bytes", 0.0))
    shown = ("task", "workers", "collective", "engine", "gradients", "seed", "steps", "batch")
    return {
        "schema": SCHEMA,
        **{key: getattr(config, key) for key in shown},
        "compressor": registry.call(config.make_compressor(config.steps - 1)),
        "compressor_name": config.compressor,
        "test_accuracy": None,
        "test_loss": None,
        "failed": {"step": error.step, "reason": str(error)},
        "payload_bytes_up": round(spent.get("payload_bytes_up", 0.0)),
        "payload_bytes_down": round(spent.get("payload_bytes_down", 0.0)),
        "wire_bytes": {"per_worker": round(wire), "total": round(wire * config.workers)},
        "config_hash": config.hash,
        "config": config.model_dump(mode="json"),
        "provenance": run.read_provenance(),
    }


def require_device(device: str) -> None:
    """Raise UsageError for a device that this machine does not have."""
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UsageError(f"device {device!r}: expected 'cpu', 'cuda' or 'cuda:0'") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"device {device!r}: torch sees no CUDA device; see `gcbench info`")
    if kind not in ("cpu", "cuda"):
        raise GcbenchError(f"device {device!r} is not supported; use 'cpu' or 'cuda'")
