"""Gradient compression in a Lightning Trainer: `callbacks=[Compression("int8")]`."""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import ReferenceType, ref

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the same classes in the older package
    from pytorch_lightning import Callback, LightningModule, Trainer

from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.integrations import frameworks
from gcbench.integrations.ddp import CommHook

OTHERS = {
    "FSDPStrategy": (
        "it uses FSDP1, whose reduction cannot be replaced. Use fully_shard in your own loop and "
        "call gcbench.shard_hook(...).register(model)"
    ),
    "ModelParallelStrategy": (
        "it has no DistributedDataParallel model. Leave the callback out and call "
        "gcbench.shard_hook(...).register(model) after fully_shard in configure_model"
    ),
    "DeepSpeedStrategy": "DeepSpeed reduces the gradients itself and does not support hooks",
}
"""Class of a strategy -> why it cannot have a hook, and what to call instead."""


class Compression(Callback):  # type: ignore[misc]
    """Compress the gradients of a Trainer whose strategy is DDP.

    `Trainer(strategy="ddp", callbacks=[Compression("int8")])`. The callback registers a
    `gcbench.comm_hook` on the model of each `fit`. The hook follows the learning rates of all
    optimizers and the GradScaler's scale. The Trainer's loggers receive `gcbench/sent_bytes`,
    `gcbench/fp32_bytes`, `gcbench/bits_per_element` and the comparisons of `check_every` from rank
    0, every `log_every_n_steps` and at each check.

    A checkpoint contains the state of every rank. Rank 0 gathers them in its memory: 4 bytes per
    parameter and rank for a method with error feedback. `fit(ckpt_path=...)` with the same number
    of ranks ends in the same bits as an uninterrupted job. A checkpoint that Lightning saves after
    an exception has no states, since other ranks may be at another step or gone.

    Args:
        compressor: a registered name, a file (./mine.py), or a compressor.
        options: arguments of `gcbench.comm_hook` except `optimizer` and `scaler`.

    Raises:
        gcbench.core.errors.UsageError: here, an invalid option; in `fit`, on every rank, a strategy
            other than DDP.
    """

    def __init__(self, compressor: str | Compressor, **options: Any) -> None:
        frameworks.make(compressor, options).close()  # refuse invalid options here, not in `fit`
        self._compressor, self._options = compressor, options
        self._hook: CommHook | None = None
        self._module: ReferenceType[LightningModule] | None = None
        """The module whose gradients the hook exchanges."""
        self._states: dict[str, Any] = {}
        """Every rank's state in the checkpoint that `fit` resumes from."""
        self._interrupted = False

    @property
    def hook(self) -> CommHook:
        """The hook of the current or last `fit`.

        Raises:
            gcbench.core.errors.UsageError: `fit` has not registered one yet.
        """
        if self._hook is None:
            raise UsageError("there is no hook before fit: read it in a callback, or after fit")
        return self._hook

    # -- called by the Trainer ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that cannot have a hook, before the Trainer builds anything."""
        self._states, self._interrupted = {}, False
        if stage == "fit":
            classes = {cls.__name__ for cls in type(trainer.strategy).__mro__}
            for name in OTHERS.keys() & classes:
                _refuse(trainer, OTHERS[name])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the hook on the model that the strategy wrapped."""
        model = frameworks.wrapped(trainer.strategy.model)
        if model is None:
            _refuse(trainer, "it has no DistributedDataParallel model")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        hook = frameworks.make(self._compressor, self._options, trainer.optimizers, scaler)
        if trainer.ckpt_path is not None and not self._states:
            frameworks.warn_missing(trainer.ckpt_path)
        elif trainer.ckpt_path is None:
            self._states = self._last(pl_module)
        if self._states:
            hook.load_state_dict(self._states)
        hook.register(model)
        self._hook, self._module, self._states = hook, ref(pl_module), {}
        self._metrics, self._step = frameworks.Metrics(hook), hook.step

    def _last(self, module: LightningModule) -> dict[str, Any]:
        """Return the state at the end of the last `fit` of the same module; else {}."""
        if self._hook is None or self._module is None or self._module() is not module:
            return {}
        return self._hook.state_dict()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log bytes and comparisons after a batch that ended a step."""
        exchanges, every = self.hook.step, trainer.log_every_n_steps
        step = trainer.fit_loop.epoch_loop._batches_that_stepped  # the step in Lightning's logs
        due = exchanges > self._step and every and (step + 1) % every == 0
        self._step = exchanges
        if due or self._metrics.checked:
            values = self._metrics()
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop gathering states, as other ranks may be gone. End the hook's thread."""
        self._interrupted = True
        if self._hook is not None:
            self._hook.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """End the hook's thread. Checkpoints saved after `fit` contain its last state."""
        if self._hook is not None:
            self._hook.close()

    def state_dict(self) -> dict[str, Any]:
        """Return every rank's state on rank 0, for the checkpoint. All ranks call it."""
        if self._hook is None or self._interrupted:
            return {}
        return frameworks.gather(self._hook)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the states of the checkpoint that `fit` resumes from; it registers a hook next."""
        self._states = state_dict


def _refuse(trainer: Trainer, why: str) -> NoReturn:
    raise UsageError(
        f"Compression with the strategy {type(trainer.strategy).__name__}: {why}. "
        'Compression works with Trainer(strategy="ddp")'
    )
