"""Gradient compression in a Transformers Trainer: `callbacks=[Compression("int8")]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gcbench.core.compressor import Compressor
from gcbench.core.errors import UsageError
from gcbench.integrations import accelerate, frameworks
from gcbench.integrations.ddp import CommHook

NAME = "gcbench"
"""Prefix of the files in a checkpoint."""


class Compression(TrainerCallback):  # type: ignore[misc]
    """Compress the gradients of a Trainer that runs as several processes.

    `Trainer(..., callbacks=[Compression("int8")])`, started by torchrun or `accelerate launch`. The
    callback registers a `gcbench.comm_hook` on the model that the Trainer wraps in DDP; the hook
    follows the optimizer's learning rates. The Trainer's logs also contain rank 0's
    `gcbench/sent_bytes`, `gcbench/fp32_bytes`, `gcbench/bits_per_element` and the comparisons of
    `check_every`, every `logging_steps` and at each check.

    Each rank writes its state to the checkpoint's folder, as `gcbench_rank0.pt` and so on, unless
    `save_only_model` is set or a hyperparameter search runs. `train(resume_from_checkpoint=...)`
    with the same number of ranks ends in the same bits as an uninterrupted job.

    Args:
        compressor: a registered name, a file (./mine.py), or a compressor.
        options: arguments of `gcbench.comm_hook` except `optimizer` and `scaler`.

    Raises:
        gcbench.core.errors.UsageError: here, an invalid option; in `train`, on every rank, a model
            that is not wrapped by DistributedDataParallel.
    """

    def __init__(self, compressor: str | Compressor, **options: Any) -> None:
        frameworks.make(compressor, options).close()  # refuse invalid options here, not in `train`
        self._compressor, self._options = compressor, options
        self._hook: CommHook | None = None
        self._model: DistributedDataParallel | None = None

    @property
    def hook(self) -> CommHook:
        """The hook of the current or last `train`.

        Raises:
            gcbench.core.errors.UsageError: `train` has not registered one yet.
        """
        if self._hook is None:
            raise UsageError("there is no hook before train: read it in a callback, or after train")
        return self._hook

    # -- called by the Trainer ---------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Register the hook on the model that the Trainer wrapped, and load its state."""
        trainer, checkpoint = _calling_trainer()
        model = accelerate.checked(trainer.accelerator, trainer.model_wrapped)
        state_dict = None if checkpoint is None else frameworks.load(checkpoint, NAME)
        if checkpoint is not None and state_dict is None:
            frameworks.warn_missing(checkpoint)
        if self._hook is None or self._model is not model:
            if self._hook is not None:
                self._hook.close()
            self._hook = frameworks.make(
                *(self._compressor, self._options),
                *(trainer.optimizer, trainer.accelerator.scaler),
            )
            if state_dict is not None:
                self._hook.load_state_dict(state_dict)
            self._hook.register(model)
            self._model = model
        elif state_dict is not None:  # a second `train` of the same model
            self._hook.load_state_dict(state_dict)
        self._metrics = frameworks.Metrics(self._hook)
        # Reporters log before the user's callbacks run, so this callback moves to the front.
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the Trainer log at each checked step."""
        if self._metrics.checked:
            control.should_log = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add bytes and comparisons to the logs of training steps."""
        if logs is not None and "loss" in logs:
            values = self._metrics()
            logs.update(values)
            state.log_history[-1].update(values)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write this rank's state to the checkpoint that the Trainer has just written."""
        if not (args.save_only_model or state.is_hyper_param_search):
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            frameworks.save(self.hook, folder, NAME)


def _calling_trainer() -> tuple[Trainer, str | None]:
    """Return the Trainer that called the callback, and the checkpoint that it resumes from.

    A Trainer does not pass itself, the DDP model or the checkpoint's folder to its callbacks, so
    they are read from the calling method, `_inner_training_loop`.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if isinstance(names.get("self"), Trainer) and "resume_from_checkpoint" in names:
            return names["self"], names["resume_from_checkpoint"]
        frame = frame.f_back  # type: ignore[assignment]
    raise UsageError(
        "Compression was called by something other than the training loop of a "
        "transformers.Trainer: pass it as Trainer(..., callbacks=[Compression(...)])"
    )
