"""Jobs of two processes in Lightning, Accelerate and Transformers, for tests of their adapters.

Each job returns what a test looks at. The packages are imported by the jobs that need them.
"""

from __future__ import annotations

import contextlib
import csv
import faulthandler
import importlib.util
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from jobs import digest
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import gcbench
from gcbench.core.errors import UsageError

BATCH = 8
EPOCH = 4
"""Batches of each rank in an epoch."""
OPTIONS: dict[str, Any] = {"bucket_mb": 0.001, "timeout": 60.0}
ROOT = Path(__file__).parents[2]
PACKAGES = ("lightning", "accelerate", "transformers")
INSTALLED = [name for name in PACKAGES if importlib.util.find_spec(name)]
if "accelerate" not in INSTALLED:
    INSTALLED = [name for name in INSTALLED if name != "transformers"]  # its Trainer needs both
JOBS: dict[str, Callable[[int, int], dict[str, Any]]] = {}


def needs(name: str) -> list[str]:
    """Return the packages that a job needs, by its name."""
    package = name.partition("_")[0]
    return {"transformers": ["transformers", "accelerate"]}.get(
        package, [package] if package in PACKAGES else []
    )


def job(function: Callable[[int, int, Path], Any]) -> Callable[[int, int, Path], Any]:
    """Have the function run as a job, in a folder that the ranks share, as torchrun would start it.

    Warnings of the frameworks are not errors here.
    """

    def run(rank: int, size: int) -> dict[str, Any]:
        faulthandler.dump_traceback_later(300, exit=True)  # imports alone may take a minute
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": 29500}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        with contextlib.ExitStack() as stack:
            folder = [stack.enter_context(tempfile.TemporaryDirectory()) if rank == 0 else ""]
            dist.broadcast_object_list(folder, 0)
            stack.callback(dist.barrier)
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            return function(rank, size, Path(folder[0]))

    JOBS[function.__name__] = run
    return function


# ---- what all train ------------------------------------------------------------------------------


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))


def data(size: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(size * BATCH * EPOCH, 10, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def loader(rank: int, size: int) -> DataLoader[Any]:
    """Return a loader of this rank's data; no framework distributes it again."""
    return DataLoader(TensorDataset(*(each[rank::size] for each in data(size))), BATCH)


def optimizers(parameters: Any) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer and a schedule that changes the rate within each half of two epochs."""
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.25)


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def end(module: nn.Module) -> str:
    return digest(flat(module))


def by_hand(
    rank: int,
    size: int,
    method: str | None = "onebit",
    *,
    follow: bool | None = True,
    accumulate: int = 1,
    check_every: int = 0,
    epochs: int = 2,
    renew: int | None = None,
    make: Callable[[nn.Module], list[tuple[Any, Any]]] = lambda model: [
        optimizers(model.parameters())
    ],
) -> dict[str, Any]:
    """Train in plain DDP with `gcbench.comm_hook`, or without one: method None.

    `renew`: the epoch that begins with new optimizers; `make`: returns them, with their schedules.
    `follow`: whether the hook is given the rate by hand at each step; None: by `optimizer=`.
    """
    model = DDP(net())
    pairs = make(model.module)
    hook = None
    if method is not None:
        rates = {} if follow is not None else {"optimizer": [pair[0] for pair in pairs]}
        hook = gcbench.comm_hook(method, check_every=check_every, **OPTIONS, **rates)
        hook.register(model)
    for epoch in range(epochs):
        if epoch == renew:
            pairs = make(model.module)
        for i, (x, y) in enumerate(loader(rank, size)):
            if hook is not None and follow is not None:
                hook.lr = pairs[0][0].param_groups[0]["lr"] if follow else 1.0
            last = (i + 1) % accumulate == 0
            with contextlib.nullcontext() if last else model.no_sync():
                (cross_entropy(model(x), y) / accumulate).backward()
            if last:
                for optimizer, _ in pairs:
                    optimizer.step()
                    optimizer.zero_grad()
                for _, schedule in pairs:  # the reference does not depend on their order
                    schedule.step()
    result: dict[str, Any] = {"end": end(model.module)}
    if hook is not None:
        traffic, records = hook.traffic, hook.records
        result |= {"sent": traffic.payload_up, "fp32": hook.plain_bytes, "steps": hook.step}
        result["records"] = [[r.step, r.name, r.relative_error, r.cosine] for r in records]
        hook.close()
    return result


def refused(call: Callable[[], Any]) -> str:
    """Return the text of the UsageError that `call` raises; "" if it raises none."""
    try:
        call()
    except UsageError as error:
        return str(error)
    return ""


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Collect the UserWarnings of gcbench."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if "compress" in str(each.message)]


@job
def reference(rank: int, size: int, folder: Path) -> dict[str, Any]:
    return {
        "onebit": by_hand(rank, size, check_every=3),
        "rate 1": by_hand(rank, size, follow=False)["end"],
        "none": by_hand(rank, size, None)["end"],
        "accumulated": by_hand(rank, size, accumulate=2),
        "longer": by_hand(rank, size, epochs=3)["end"],
        "renewed": by_hand(rank, size, epochs=3, renew=2)["end"],
    }


# ---- Lightning -----------------------------------------------------------------------------------


def _lightning(folder: Path, epochs: int, module: Any = None, ckpt: Any = None, **options: Any):
    """Fit a module and return it, its Trainer and the callback."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    from gcbench.integrations.lightning import Compression

    _quiet_lightning()

    module = _module() if module is None else module
    callback = options.pop("callback", None) or Compression(
        "onebit", **OPTIONS, **options.pop("hook", {})
    )
    trainer = options.pop("trainer", None) or pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=options.pop("strategy", None) or DDPStrategy(process_group_backend="gloo"),
        max_epochs=epochs,
        callbacks=[callback, *options.pop("extra", [])],
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"logger": False, **options},
    )
    trainer.fit_loop.max_epochs = epochs
    batches = loader(dist.get_rank(), dist.get_world_size())
    trainer.fit(module, batches, batches, ckpt_path=ckpt)
    return module, trainer, callback


def _module() -> Any:
    """Return a new LightningModule of the network that all train."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("loss", cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = optimizers(self.parameters())
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def _quiet_lightning() -> None:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


@job
def lightning(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Train; with accumulation; a second `fit`; and from a checkpoint."""
    from lightning.pytorch.loggers import CSVLogger

    logger = CSVLogger(folder, "log", "")
    module, trainer, callback = _lightning(
        folder, 2, logger=logger, log_every_n_steps=4, hook={"check_every": 3}
    )
    hook = callback.hook
    result: dict[str, Any] = {
        "end": end(module),
        "steps": hook.step,
        "sent": hook.traffic.payload_up,
        "closed": hook._closed,
    }
    if rank == 0:
        result["rows"] = _rows(folder / "log")
    result["validated"] = len(trainer.validate(module, loader(rank, size), verbose=False))
    trainer.save_checkpoint(folder / "after.ckpt")
    again = _lightning(folder, 3, module, trainer=trainer, callback=callback)
    result["second fit"] = end(again[0])
    result["after fit"] = end(_lightning(folder, 3, ckpt=folder / "after.ckpt")[0])
    saved = _lightning(folder, 1)
    saved[1].save_checkpoint(folder / "one.ckpt")
    resumed = _lightning(folder, 2, ckpt=folder / "one.ckpt")
    result["resumed"], result["resumed steps"] = end(resumed[0]), resumed[2].hook.step
    logger = CSVLogger(folder, "accumulated", "")
    words = {"logger": logger, "log_every_n_steps": 1, "accumulate_grad_batches": 2}
    module, _, callback = _lightning(folder, 2, **words)
    result["accumulated"] = {"end": end(module), "steps": callback.hook.step}
    if rank == 0:
        result["accumulated rows"] = _rows(folder / "accumulated")
    return result


def _rows(folder: Path) -> list[dict[str, str]]:
    """Return what Lightning's logger wrote about compression."""
    with open(folder / "metrics.csv") as lines:
        return [row for row in csv.DictReader(lines) if row["gcbench/sent_bytes"]]


def two(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return an optimizer and a schedule for each half of the network, with different rates."""
    first = torch.optim.SGD(module[0].parameters(), 0.1)
    second = torch.optim.AdamW(module[2].parameters(), 1e-3)
    scheduler = torch.optim.lr_scheduler
    return [(first, scheduler.StepLR(first, 2, 0.5)), (second, scheduler.StepLR(second, 3, 2.0))]


@job
def lightning_two(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Several optimizers, stepped by the module, against a DDP job with `optimizer=[...]`."""
    import lightning.pytorch as pl

    class Two(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.net = net()

        def training_step(self, batch: Any, number: int) -> None:
            self.manual_backward(cross_entropy(self.net(batch[0]), batch[1]))
            for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

        def configure_optimizers(self) -> Any:
            return [list(each) for each in zip(*two(self.net), strict=True)]

    module, _, callback = _lightning(folder, 2, Two())
    return {
        "end": end(module),
        "steps": callback.hook.step,
        "by hand": by_hand(rank, size, make=two, follow=None)["end"],
        "rate 1": by_hand(rank, size, make=two, follow=False)["end"],
    }


@job
def lightning_states(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Checkpoints that lack what the callback needs, or were made by another job."""
    import lightning.pytorch as pl

    _, trainer, _ = _lightning(folder, 1)
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    whole = torch.load(folder / "whole.ckpt", weights_only=True)
    (key,) = (key for key in whole["callbacks"] if "Compression" in key)
    states = whole["callbacks"][key]
    result: dict[str, Any] = {"ranks": sorted(states)}
    if rank == 0:
        torch.save({**whole, "callbacks": {}}, folder / "none.ckpt")
        torch.save(
            {**whole, "callbacks": {key: {"rank 0 of 1": states["rank 0 of 2"]}}},
            folder / "one.ckpt",
        )
    dist.barrier()
    with warned() as texts:
        callback = _lightning(folder, 2, ckpt=folder / "none.ckpt")[2]
    result["without"] = {"steps": callback.hook.step, "warned": texts}
    result["one rank"] = refused(lambda: _lightning(folder, 2, ckpt=folder / "one.ckpt"))

    def found_rate(lr: float = 1e-3) -> Any:
        """Return a module whose rate a LearningRateFinder sets."""
        module = _module()
        module.lr = lr
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), module.lr)
        return module

    class Fails(pl.Callback):
        """A job that raises on all ranks, and saves before it ends."""

        def on_train_batch_end(self, trainer: Any, *words: Any) -> None:
            raise RuntimeError("broken off")

    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from gcbench.integrations.lightning import Compression

    callback = Compression("onebit", **OPTIONS)
    trainer.callbacks = [callback, Fails(), OnExceptionCheckpoint(folder)]
    with contextlib.suppress(RuntimeError):
        _lightning(folder, 3, trainer=trainer, callback=callback)
    fitted = _lightning(
        folder, 2, found_rate(), extra=[pl.callbacks.LearningRateFinder(num_training_steps=12)]
    )
    result["after the search"] = [fitted[2].hook.step, end(fitted[0])]
    fitted = _lightning(folder, 2, found_rate(fitted[0].lr))
    result["without a search"] = [fitted[2].hook.step, end(fitted[0])]
    broken = torch.load(folder / "on_exception.ckpt", weights_only=True)
    result["on exception"] = [key for key in broken["callbacks"] if "Compression" in key]
    result["closed"] = callback.hook._closed
    return result


@job
def lightning_refusals(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from lightning.pytorch import strategies

    from gcbench.integrations.lightning import Compression

    def fits(module: Any, **options: Any) -> Callable[[], Any]:
        return lambda: _lightning(folder, 1, module, **options)

    def sets_up(strategy: Any) -> Callable[[], Any]:
        trainer = SimpleNamespace(strategy=strategy)
        return lambda: Compression("int8").setup(trainer, None, "fit")

    deepspeed = type("DeepSpeedStrategy", (strategies.DDPStrategy,), {})()
    single = strategies.SingleDeviceStrategy()
    fitted = {
        "single": refused(fits(None, strategy=single)),
        "fsdp": refused(sets_up(strategies.FSDPStrategy())),
        "fsdp2": refused(sets_up(strategies.ModelParallelStrategy())),
        "deepspeed": refused(sets_up(deepspeed)),
        "option": refused(lambda: Compression("int8", nothing=1)),
        "optimizer": refused(lambda: Compression("int8", optimizer=None)),
        "hook": refused(lambda: Compression("int8").hook),
    }
    return fitted


# ---- Accelerate ----------------------------------------------------------------------------------


def _accelerate(
    size: int, epochs: range, *, folder: Path | None = None, load: bool = False, **words
):
    """Train as `by_hand` does; save to the folder at the end, or load from it at the beginning."""
    from accelerate import Accelerator

    from gcbench.integrations.accelerate import compress

    options, log_every = words.pop("hook", {}), words.pop("log_every", 50)
    accelerator = Accelerator(cpu=True, **words)
    accelerator.init_trackers("job")
    model = net()
    optimizer, schedule = optimizers(model.parameters())
    model, optimizer = accelerator.prepare(model, optimizer)
    batches = loader(dist.get_rank(), size)
    hook = compress(
        accelerator, model, optimizer, "onebit", log_every=log_every, **OPTIONS, **options
    )
    accelerator.register_for_checkpointing(schedule)
    if load:
        accelerator.load_state(folder)
    for _ in epochs:
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                if accelerator.sync_gradients:
                    schedule.step()
    if folder is not None and not load:
        accelerator.save_state(folder)
    return accelerator, model, hook


def _tracker() -> Any:
    from accelerate.tracking import GeneralTracker

    class Tracker(GeneralTracker):
        """Store the logged values."""

        name = "rows"
        requires_logging_directory = False

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []

        @property
        def tracker(self) -> Any:
            return self.rows

        def store_init_configuration(self, values: Any) -> None:
            pass

        def log(self, values: dict[str, Any], step: int | None = None, **words: Any) -> None:
            self.rows.append([step, values])

    return Tracker()


@job
def accelerate(rank: int, size: int, folder: Path) -> dict[str, Any]:
    tracker = _tracker()
    _, model, hook = _accelerate(
        size, range(2), log_with=[tracker], log_every=4, hook={"check_every": 3}
    )
    result: dict[str, Any] = {
        "end": end(model),
        "steps": hook.step,
        "sent": hook.traffic.payload_up,
        "rows": tracker.rows,
    }
    hook.close()
    _accelerate(size, range(1), folder=folder / "saved")[2].close()
    dist.barrier()
    result["files"] = sorted(path.name for path in (folder / "saved").glob("gcbench*"))
    _, model, hook = _accelerate(size, range(1, 2), folder=folder / "saved", load=True)
    result["resumed"], result["resumed steps"] = end(model), hook.step
    hook.close()
    _, model, hook = _accelerate(size, range(2), gradient_accumulation_steps=2)
    result["accumulated"] = {"end": end(model), "steps": hook.step}
    hook.close()
    return result


@job
def accelerate_states(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Two models of one job, and checkpoints that lack a state."""
    from accelerate import Accelerator

    from gcbench.integrations.accelerate import compress

    def job() -> tuple[Any, list[Any]]:
        accelerator = Accelerator(cpu=True)
        hooks = []
        for name in ("onebit", "topk"):
            model = net()
            optimizer, _ = optimizers(model.parameters())
            model, optimizer = accelerator.prepare(model, optimizer)
            hooks.append(compress(accelerator, model, optimizer, name, **OPTIONS))
            x, y = next(iter(loader(rank, size)))
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
        return accelerator, hooks

    result: dict[str, Any] = {}
    accelerator, hooks = job()
    accelerator.save_state(folder / "two")
    states = [hook.state_dict() for hook in hooks]
    other, again = job()
    other.load_state(folder / "two")
    result["loaded"] = all(
        torch.equal(a, b)
        for hook, state in zip(again, states, strict=True)
        for a, b in zip(tensors(hook.state_dict()), tensors(state), strict=True)
    )
    dist.barrier()
    if rank == 0:
        (folder / "two" / "gcbench_1_rank1.pt").unlink()
        for number in (0, 1):
            (folder / "two" / f"gcbench_0_rank{number}.pt").unlink()
    dist.barrier()
    with warned() as texts:
        message = refused(lambda: other.load_state(folder / "two"))
    result["without"], result["one rank"] = texts, message
    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer, _ = optimizers(model.parameters())
    model(loader(rank, size).dataset.tensors[0]).sum().backward()
    optimizer.step()
    model, optimizer = accelerator.prepare(model, optimizer)
    with warned() as texts:
        hooks.append(compress(accelerator, model, optimizer, "onebit", **OPTIONS))
    result["late"] = texts
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    with warned() as texts:
        hooks.append(compress(accelerator, model, optimizer, "onebit", **OPTIONS))
    result["new"] = texts
    accelerator.save_state(folder / "stateless")
    dist.barrier()  # rank 1 loads the model that rank 0 writes
    accelerator = Accelerator(cpu=True)
    model = net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.load_state(folder / "stateless")
    with warned() as texts:
        hooks.append(compress(accelerator, model, optimizer, "onebit", **OPTIONS))
    result["loaded first"] = texts
    for hook in (*hooks, *again):
        hook.close()
    return result


@job
def accelerate_again(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A second hook, after the first one was closed; the optimizer is the same."""
    from accelerate import Accelerator

    from gcbench.integrations.accelerate import compress

    tracker = _tracker()
    accelerator = Accelerator(cpu=True, log_with=[tracker])
    accelerator.init_trackers("job")
    module, (x, y) = net(), next(iter(loader(rank, size)))
    optimizer = accelerator.prepare(optimizers(module.parameters())[0])
    hooks = []
    for steps in (4, 3):
        model = accelerator.prepare(module)
        hooks.append(compress(accelerator, model, optimizer, "onebit", log_every=2, **OPTIONS))
        for _ in range(steps):
            accelerator.backward(cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if steps == 4:
            hooks[0].close()
    accelerator.save_state(folder / "again")
    dist.barrier()  # rank 1 loads the model that rank 0 writes
    files = sorted(path.name for path in (folder / "again").glob("gcbench*"))
    saved = tensors(hooks[1].state_dict())
    loss = refused(lambda: accelerator.load_state(folder / "again"))
    loaded = tensors(hooks[1].state_dict())
    hooks[1].close()
    return {
        "files": files,
        "load": loss,
        "steps": hooks[1].step,
        "equal": all(torch.equal(*pair) for pair in zip(saved, loaded, strict=True)),
        "rows": [step for step, values in tracker.rows if "gcbench/sent_bytes" in values],
    }


def tensors(state: Any) -> list[Tensor]:
    """Return the tensors of a state, in the order of its entries."""
    if isinstance(state, Tensor):
        return [state]
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for value in values for tensor in tensors(value)]


@job
def accelerate_refusals(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from gcbench.integrations.accelerate import compress

    accelerator = Accelerator(cpu=True)
    model, optimizer = net(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def of(kind: Any) -> str:
        stub = SimpleNamespace(distributed_type=kind, scaler=None)
        return refused(lambda: compress(stub, model, optimizer, "int8"))

    kinds = ("NO", "FSDP", "DEEPSPEED", "MEGATRON_LM")
    prepared = accelerator.prepare(net())
    return {
        **{kind: of(DistributedType[kind]) for kind in kinds},
        "not prepared": refused(lambda: compress(accelerator, model, optimizer, "int8")),
        "no optimizer": refused(lambda: compress(accelerator, prepared, None, "int8")),
        "option": refused(lambda: compress(accelerator, prepared, optimizer, "int8", nothing=1)),
        "log_every": refused(
            lambda: compress(accelerator, prepared, optimizer, "int8", log_every=-1)
        ),
    }


# ---- Transformers --------------------------------------------------------------------------------


def _gpt2(folder: Path, **options: Any) -> tuple[Any, Any, Any]:
    """Return a very small GPT-2, the arguments of six steps with a checkpoint at 3 and 6, data."""
    import transformers
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    ids = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(0))
    words: dict[str, Any] = {
        "max_steps": 6,
        "save_steps": 3,
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "report_to": [],
        "disable_tqdm": True,
        **options,
    }
    arguments = TrainingArguments(str(folder), **words)
    return model, arguments, [{"input_ids": row, "labels": row} for row in ids]


def _transformers(folder: Path, callbacks: list[Any], resume: Any = None, **options: Any) -> Any:
    """Train a very small GPT-2; return the Trainer."""
    from transformers import Trainer

    model, arguments, dataset = _gpt2(folder, **options)
    trainer = Trainer(model, arguments, train_dataset=dataset, callbacks=callbacks)
    for callback in callbacks:
        callback.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@job
def transformers(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Train; by hand; a second `train`; and from a checkpoint."""
    from transformers import TrainerCallback

    from gcbench.integrations.transformers import Compression

    class ByHand(TrainerCallback):
        """Register a hook and set its rate, as a user does who has the Trainer at hand."""

        hook: Any = None

        def __init__(self, *, follow: bool = True) -> None:
            self.follow = follow

        def on_step_begin(self, args: Any, state: Any, control: Any, **words: Any) -> None:
            if self.hook is None:
                model = self.trainer.model_wrapped
                self.hook = gcbench.comm_hook("onebit", **OPTIONS).register(model)
            rate = words["optimizer"].param_groups[0]["lr"]
            self.hook.lr = rate if self.follow else 1.0

    class Reporter(TrainerCallback):
        """The Trainer calls those that log before the user's callbacks."""

        def __init__(self) -> None:
            self.rows: list[Any] = []

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **words: Any):
            self.rows.append([state.global_step, dict(logs)])

    def compressed(name: str, resume: Any = None, **options: Any) -> tuple[Any, Any]:
        callback = Compression("onebit", **OPTIONS, **options.pop("hook", {}))
        return _transformers(folder / name, [callback], resume, **options), callback

    def by_hand(name: str, **words: Any) -> tuple[str, int, float, float]:
        callback = ByHand(**words)
        trainer = _transformers(folder / name, [callback])
        hook = callback.hook
        return end(trainer.model), hook.step, hook.traffic.payload_up, hook.plain_bytes

    reporter, callback = Reporter(), Compression("onebit", check_every=3, **OPTIONS)
    trainer = _transformers(folder / "whole", [reporter, callback])
    hook = callback.hook
    result: dict[str, Any] = {
        "end": [end(trainer.model), hook.step, hook.traffic.payload_up, hook.plain_bytes],
        "by hand": by_hand("by hand"),
        "rate 1": by_hand("rate 1", follow=False)[0],
        "none": end(_transformers(folder / "none", []).model),
        "rows": reporter.rows,
        "history": trainer.state.log_history,
        "records": [[r.step, r.name, r.relative_error, r.cosine] for r in hook.records],
        "files": sorted(p.name for p in (folder / "whole" / "checkpoint-3").glob("gcbench*")),
    }
    dist.barrier()
    resumed, other = compressed("resumed", folder / "whole" / "checkpoint-3")
    result["resumed"] = [end(resumed.model), other.hook.step]
    trainer.train(resume_from_checkpoint=folder / "whole" / "checkpoint-3")
    result["again"] = [end(trainer.model), hook.step]
    trainer.args.max_steps = 9
    trainer.train(resume_from_checkpoint=folder / "whole" / "checkpoint-6")
    result["second train"] = [end(trainer.model), callback.hook is hook, hook.step]
    longer = compressed("longer", folder / "whole" / "checkpoint-6", max_steps=9)
    result["longer"] = end(longer[0].model)
    _, other = compressed("accumulated", gradient_accumulation_steps=2)
    result["accumulated steps"] = other.hook.step
    with warned() as texts:
        _, other = compressed("late", folder / "none" / "checkpoint-3")
    result["without"] = {"steps": other.hook.step, "warned": texts}
    dist.barrier()
    if rank == 0:
        (folder / "whole" / "checkpoint-3" / "gcbench_rank0.pt").unlink()
        (folder / "whole" / "checkpoint-3" / "gcbench_rank1.pt").rename(
            folder / "whole" / "checkpoint-3" / "gcbench_rank2.pt"
        )
    dist.barrier()
    result["one rank"] = refused(lambda: compressed("one", folder / "whole" / "checkpoint-3"))
    compressed("weights", save_only_model=True)
    result["weights"] = sorted(p.name for p in (folder / "weights" / "checkpoint-3").glob("gc*"))
    return result


@job
def transformers_refusals(rank: int, size: int, folder: Path) -> dict[str, Any]:
    from gcbench.integrations.transformers import Compression

    def called() -> None:
        Compression("int8").on_train_begin(None, None, None)

    return {
        "option": refused(lambda: Compression("int8", nothing=1)),
        "optimizer": refused(lambda: Compression("int8", optimizer=None)),
        "hook": refused(lambda: Compression("int8").hook),
        "called": refused(called),
    }


# ---- hooks without register ---------------------------------------------------------------------


def forward(model: nn.Module) -> Callable[[], Any]:
    return lambda: model(torch.zeros(1, 10))


@job
def unregistered(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """A DDP model without a hook, beside a hook that is never registered."""
    plain = DDP(net())
    result: dict[str, Any] = {"before": refused(forward(plain))}
    hook = gcbench.comm_hook("topk")
    result["made"] = refused(forward(plain))
    result["again"] = refused(forward(plain))
    with torch.no_grad():
        result["no gradient"] = refused(forward(plain))
    result["evaluation"] = refused(forward(plain.eval()))
    result["not wrapped"] = refused(forward(net()))
    plain.train()
    second = gcbench.comm_hook("int8", **OPTIONS)
    hook.close()
    result["closed, and a second"] = refused(forward(plain))
    other = DDP(net())
    second.register(other)
    result["registered"] = [refused(forward(plain)), refused(forward(other))]
    third = gcbench.comm_hook("topk")
    result["another waits"] = [refused(forward(plain)), refused(forward(other))]
    second.close()
    del third
    result["deleted"] = refused(forward(plain))
    fourth = gcbench.comm_hook("topk")
    refused(lambda: fourth.register(net()))
    result["not for DDP"] = refused(forward(plain))
    result["watched"] = len(torch.nn.modules.module._global_forward_pre_hooks)
    return result


@job
def lightning_argument(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Hand a hook to a strategy, which drops it on the CPU."""
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy

    def fit(**words: Any) -> Callable[[], Any]:
        strategy = DDPStrategy(process_group_backend="gloo", **words)
        return lambda: _lightning(folder, 1, callback=pl.Callback(), strategy=strategy)

    hook = gcbench.comm_hook("topk")
    result = {
        "hook": refused(fit(ddp_comm_hook=hook)),
        "state": refused(fit(ddp_comm_state=hook, ddp_comm_hook=lambda state, bucket: None)),
    }
    hook.close()
    result["none"] = refused(fit())
    return result


@job
def accelerate_argument(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Pass a hook to Accelerate's handler, which drops everything but its own names."""
    from accelerate import Accelerator, DistributedDataParallelKwargs

    def train(*handlers: Any) -> None:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[*handlers])
        forward(accelerator.prepare(net()))()

    hook = gcbench.comm_hook("topk")
    result = {"hook": refused(lambda: train(DistributedDataParallelKwargs(comm_hook=hook)))}
    hook.close()
    result["none"] = refused(train)
    return result


# ---- the guide -----------------------------------------------------------------------------------


def example(folder: Path, name: str, **words: Any) -> dict[str, Any]:
    """Run the guide's example for one framework in the folder, with the user's own objects."""
    guide = (ROOT / "gcbench/docs/your-job.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (text,) = [each for each in examples if f"gcbench.integrations.{name}" in each]
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(compile(text, name, "exec"), words)
    finally:
        os.chdir(before)
    hook = words["hook"]
    return {"steps": hook.step, "sent": hook.traffic.payload_up, "fp32": hook.plain_bytes}


@job
def guide(rank: int, size: int, folder: Path) -> dict[str, Any]:
    """Run the examples whose packages are installed."""
    result = {}
    if "lightning" in INSTALLED:
        _quiet_lightning()
        module = _module()
        result["lightning"] = example(folder, "lightning", module=module, loader=_whole(size))
        result["lightning"]["file"] = (folder / "last.ckpt").exists()
    if "accelerate" in INSTALLED:
        model = net()
        words = {"model": model, "optimizer": optimizers(model.parameters())[0]}
        words |= {"loader": _whole(size), "cross_entropy": cross_entropy}
        result["accelerate"] = example(folder, "accelerate", **words)
        result["accelerate"]["file"] = (folder / "last" / f"gcbench_0_rank{rank}.pt").exists()
    if "transformers" in INSTALLED:
        model, arguments, dataset = _gpt2(folder)
        words = {"model": model, "arguments": arguments, "dataset": dataset}
        result["transformers"] = example(folder, "transformers", **words)
        file = Path(arguments.output_dir) / "checkpoint-6" / f"gcbench_rank{rank}.pt"
        result["transformers"]["file"] = file.exists()
    return result


def _whole(size: int) -> DataLoader[Any]:
    """Return a loader of all ranks' data, which the framework distributes."""
    return DataLoader(TensorDataset(*data(size)), BATCH)
