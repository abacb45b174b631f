"""Updates of parameters by a flat gradient: optimizer steps, moving averages and local steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gcbench.core.errors import UsageError

EMA_WARM_UP = 10
"""After t steps the average's decay is at most (1 + t) / (10 + t), as in TensorFlow's
ExponentialMovingAverage with a step count."""


def step_with(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Run an optimizer step at learning rate `lr` with the parameters' `grad`.

    It skips two wrappers of torch's step: the one for hooks, which are not used here, and the one
    for torch.compile, which would import torch._dynamo (see `engines.without_compiler`).
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


class Muon(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for all other parameters, at one learning rate.

    Muon's step is scaled to the root mean square of AdamW's, .2 sqrt(max(rows, columns)) lr, so
    that both use the same rate and decay (Liu et al. 2025, arXiv:2502.16982). The
    steps are those of `torch.optim.Muon` (Jordan et al. 2024) and `torch.optim.AdamW`.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Any]],
        matrices: Set[nn.Parameter],
        lr: float,
        momentum: float,
        nesterov: bool,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """`groups`: parameters with their weight decay; `matrices`: those that Muon updates.

        Raises:
            UsageError: there are no such matrices.
        """
        if not matrices:
            raise UsageError(
                "optimizer=muon updates hidden matrices, and this model has none; use adamw"
            )

        def chosen(wanted: bool) -> list[dict[str, Any]]:
            picked = [
                {**group, "params": [p for p in group["params"] if (p in matrices) == wanted]}
                for group in groups
            ]
            return [group for group in picked if group["params"]]

        muon = torch.optim.Muon(
            chosen(True), lr, momentum=momentum, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
        )
        self.parts: list[torch.optim.Optimizer] = [muon]
        if others := chosen(False):
            self.parts.append(torch.optim.AdamW(others, lr, betas=betas, eps=eps))
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run Muon's step and AdamW's."""
        start = 0
        for part in self.parts:
            # A restored state has new groups.
            stop = start + len(part.param_groups)
            part.state, part.param_groups = self.state, self.param_groups[start:stop]
            inspect.unwrap(type(part).step)(part)
            start = stop


def descend(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[nn.Parameter],
    gradient: Tensor,
    lr: float,
) -> None:
    """Run an optimizer step with a flat gradient, float32, shape (total,)."""
    pieces = torch.split(gradient, [parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    step_with(optimizer, lr)


def clip_factor(gradients: Sequence[Tensor], limit: float) -> float:
    """Return the factor that scales tensors to a joint 2-norm of at most `limit`."""
    flat = torch.cat([each.reshape(-1) for each in gradients])
    norm = float(torch.linalg.vector_norm(flat))
    if math.isinf(norm):  # the sum of squares overflows in float32 and would clip to zero
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    return min(1.0, limit / norm) if norm else 1.0


def fitting(value: Tensor, like: Tensor) -> Tensor:
    """Return a saved tensor; ValueError if its shape or dtype differs from that of `like`."""
    if value.shape != like.shape or value.dtype != like.dtype:
        raise ValueError(
            f"{value.dtype}, shape {tuple(value.shape)}: expected {like.dtype}, shape "
            f"{tuple(like.shape)}"
        )
    return value


@torch.no_grad()
def restore(parameters: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    """Copy saved values to parameters; ValueError if a shape or dtype differs."""
    for parameter, value in zip(parameters, saved, strict=True):
        parameter.copy_(fitting(value, parameter))


class Average:
    """The exponential moving average of parameters; empty if the decay is 0."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.values = [p.detach().clone() for p in parameters] if decay else []

    def update(self, step: int, steps: int = 1) -> None:
        """Include the parameters after `step`, with the weight of `steps` steps."""
        decay = min(self.decay, (1 + step) / (EMA_WARM_UP + step)) ** steps
        for average, parameter in zip(self.values, self.parameters, strict=False):
            average.lerp_(parameter.detach(), 1 - decay)


@dataclass
class LocalSteps:
    """One worker's copy of the common parameters, and the optimizer of its steps on it."""

    common: Sequence[nn.Parameter]
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer

    @torch.no_grad()
    def difference(self, out: Tensor) -> None:
        """Write the common parameters minus this worker's to `out`, shape (total,)."""
        pieces = torch.split(out, [parameter.numel() for parameter in self.common])
        for piece, common, local in zip(pieces, self.common, self.parameters, strict=True):
            torch.sub(common.view(-1), local.view(-1), out=piece)

    @torch.no_grad()
    def take_over(self, which: slice, blend: float) -> None:
        """Set parameters to `blend` times their own values plus 1 - `blend` times the common ones.

        The optimizer keeps its state.
        """
        for common, local in zip(self.common[which], self.parameters[which], strict=True):
            if blend:
                local.mul_(blend).add_(common, alpha=1 - blend)
            else:
                local.copy_(common)

    def state(self) -> dict[str, Any]:
        """Return the parameters and the optimizer's moments, on the CPU."""
        return {
            "parameters": [parameter.detach().cpu() for parameter in self.parameters],
            "optimizer": [
                {k: v.cpu() for k, v in self.optimizer.state[parameter].items() if v is not None}
                for parameter in self.parameters
            ],
        }

    def load_state(self, saved: Mapping[str, Any]) -> None:
        """Restore a `state`; ValueError if a shape or dtype differs."""
        restore(self.parameters, saved["parameters"])
        for parameter, moments in zip(self.parameters, saved["optimizer"], strict=True):
            for moment in moments.values():
                if moment.ndim:
                    fitting(moment, parameter)
            # Adam's step count stays on the CPU, as in torch.
            self.optimizer.state[parameter] = {
                k: v.to(parameter.device) if v.ndim else v.clone() for k, v in moments.items()
            }
