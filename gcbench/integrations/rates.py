"""The learning rates and the loss scale that residuals follow; warnings about other steps."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gcbench.core.errors import UsageError
from gcbench.core.exchange import checked_rate
from gcbench.integrations import steps

if TYPE_CHECKING:
    from gcbench.integrations.hook import Hook

IDLE = 2
"""Steps of one optimizer without an exchange between them, at which the hook warns."""
REPEATED = 2
"""Successive steps with several exchanges before each of them, at which the hook warns."""
OFTEN, SHARE = 5, 0.1
"""Steps with several exchanges before them, in all and per step, at which the hook warns."""
STEP_HOOKS = "_optimizer_step_post_hooks"
"""Attribute of every optimizer whose class calls `torch.optim.Optimizer.__init__`."""


class Rates:
    """Reads each parameter's learning rate from optimizers, or returns the assigned one.

    `assigned` is None until a rate is set, or a state with a rate is loaded.
    """

    def __init__(
        self,
        optimizer: Any,
        scaler: Any,
        unsuitable: Callable[[torch.optim.Optimizer], str] = lambda optimizer: "",
    ) -> None:
        """Read from an optimizer, several in a list or tuple, or None; and a GradScaler or None.

        `unsuitable`: returns why an optimizer must not apply the method's means; "" if it may.
        """
        self.assigned: float | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.scaler: Any = None
        self._names: dict[int, str] = {}
        """Id of each parameter -> its name."""
        self._handles: list[Any] = []
        self._warned: set[str] = set()
        """Kinds of warnings so far: each is issued once."""
        self._unsuitable = unsuitable
        self._owner: Callable[[], Hook | None] = lambda: None
        self._kind: type[Hook]
        """The class of the hook that exchanges the parameters."""
        self._applied: dict[str, int] = {}
        """Name -> its exchanges (`Hook._fresh`) at the last step that moved this parameter."""
        self._repeats: dict[str, int] = {}
        """Name -> successive steps until then that had several exchanges before them."""
        self._often: dict[str, tuple[int, int]] = {}
        """Name -> all steps that had several exchanges before them, and all steps."""
        self._last: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Optimizer -> number of exchanges at its last step."""
        self._began = 0
        """Number of exchanges before any step."""
        self._idle: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        """Optimizer -> its steps since the last exchange, without the step right after it."""
        self.add(optimizer, scaler)

    def add(self, optimizer: Any, scaler: Any) -> None:
        """Read from an optimizer and a scaler from now on; None changes nothing.

        Raises:
            UsageError: not an optimizer or scaler, an unsuitable one, or there already is one.
        """
        for what, new, current in (
            ("optimizer", optimizer, self.optimizers),
            ("scaler", scaler, self.scaler),
        ):
            if new is not None and current:
                raise UsageError(f"{what} came twice: pass it to the hook or to register, once")
        if optimizer is not None:
            several = isinstance(optimizer, list | tuple)
            self.optimizers = tuple(map(plain, optimizer if several else [optimizer]))
            if not self.optimizers:
                raise UsageError("optimizer=[]: expected at least one optimizer, or None")
            if why := next(filter(None, map(self._unsuitable, self.optimizers)), ""):
                raise UsageError(why)
        if scaler is not None:
            if not callable(getattr(scaler, "get_scale", None)):
                raise UsageError(
                    f"scaler={scaler!r}: expected a torch.amp.GradScaler, or an object with "
                    "get_scale()"
                )
            self.scaler = scaler

    @property
    def source(self) -> str:
        """What the rates and the loss scale are read from."""
        source = "optimizer" if self.optimizers else "hook.lr"
        return source + (" and scaler" if self.scaler is not None else "")

    def bind(self, parameters: Mapping[str, Tensor], hook: Hook) -> None:
        """Read the rates of these parameters, which `hook` exchanges; watch optimizers' steps.

        Raises:
            UsageError: no optimizer has any of the parameters, or a group lacks a rate.
        """
        self._owner, self._kind, self._began = weakref.ref(hook), type(hook), hook.step
        if not self._handles:
            self._handles.append(steps.after_optimizers(self, Rates._stepped))
            self._handles.append(steps.before_scalers(self, Rates._check_scaler))
        self.locate(parameters)
        owner = self._owner

        def applied(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            existing = owner()
            if existing is not None and existing._active:
                existing._record_rates(optimizer)

        # On the optimizer itself: a global hook runs after those that set the next rate.
        for optimizer in self.optimizers:
            handle = optimizer.register_step_post_hook(steps.uncompiled(applied))
            self._handles.append(handle)

    def locate(self, parameters: Mapping[str, Tensor]) -> None:
        """Find the parameters in the optimizers, by the objects that the model has now.

        Raises:
            UsageError: no optimizer has any of the parameters, or a group lacks a rate.
        """
        before = self._names
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        if not self.optimizers or self._names == before:
            return
        if not any(rate is not None for rate in self.of([*parameters])):
            raise UsageError(
                "the optimizer has none of the model's parameters. Create it from "
                "model.parameters() after the model is wrapped or sharded, and pass that one"
            )

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn about a step at another rate, by another rule, or after no or several exchanges."""
        hook = self._hook()
        followed = any(optimizer is each for each in self.optimizers)
        if self.optimizers and not followed and "rate" not in self._warned:
            self._compare(optimizer)
        if hook is None:
            return
        moves = "suit" not in self._warned and any(True for _ in self._moves(optimizer))
        if moves and (why := self._unsuitable(optimizer)):
            self._warn("suit", why, 6)
        self._check_local(optimizer, hook)
        self._check_length(optimizer, hook)
        if hook._remembers:
            self._repeat(optimizer, hook)
        self._count(optimizer, hook.step)

    def _hook(self) -> Hook | None:
        """Return the hook if it exchanges gradients."""
        hook = self._owner()
        return hook if hook is not None and hook._active else None

    def _warn(self, kind: str, text: str, level: int = 7) -> None:
        """Issue a warning, once per kind; `level`: as `stacklevel` in `warnings.warn`."""
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(text, stacklevel=level)

    def _moves(self, optimizer: Any) -> Iterator[tuple[str, float]]:
        """Yield the hook's parameters with a gradient that an optimizer moves, with the rates."""
        for group in optimizer.param_groups:
            rate = None
            for parameter in group["params"]:
                name = self._names.get(id(parameter))
                if name is not None and parameter.grad is not None and group.get("lr") is not None:
                    rate = float(group["lr"]) if rate is None else rate
                    yield name, rate

    def _check_local(self, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        """Warn if an optimizer applies a gradient to which a rank added after the exchange.

        Raises:
            UsageError: it steps during the backward pass, before the exchange has ended.
        """
        name = next((name for name, _ in self._moves(optimizer) if hook._local(name)), None)
        if name is None:
            return
        kind = type(optimizer).__name__
        if torch._C._current_graph_task_id() != -1:
            raise UsageError(
                f"{kind} moves {name} during the backward pass, before its gradient is averaged, "
                "so the ranks drift apart. Call optimizer.step() after backward, or use FSDP2"
            )
        if hook.step != self._last.get(optimizer, self._began):
            self._warn(
                "local",
                f"{kind} applies a gradient of {name} to which a backward pass added after the "
                "exchange: DDP averages one backward pass per forward pass, and none of "
                "model.module(x). Unless something else averages that part, the ranks drift apart. "
                "Add the losses and call backward once, or run a forward pass of the DDP model for "
                "each backward pass, all but the last under no_sync()",
            )

    def _check_length(self, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        """Warn if the job has scaled a direction before its step, as by clipping gradients.

        It compares one tensor, and only at steps 1, 2, 4, ...: on a GPU a comparison is a wait.
        """
        if "length" in self._warned or not hook.step or hook.step & (hook.step - 1):
            return
        for parameter in (each for group in optimizer.param_groups for each in group["params"]):
            name, written = self._names.get(id(parameter)), hook._direction(parameter)
            if name is None or written is None:
                continue
            *parts, method = written
            length, whole = (float(part.float().norm()) for part in parts)
            if not 0 < whole < math.inf:
                continue
            share, allowed = length / whole, (1, 1 / (self.scale or 1))
            if not any(math.isclose(share, each, rel_tol=0.02) for each in allowed):
                self._warn(
                    "length",
                    f"{type(optimizer).__name__} applies {share:.3g} times what the hook wrote to "
                    f"the gradient of {name}, as after clip_grad_norm_. "
                    f"{method!r} returns directions, whose length does not "
                    "depend on that of the gradient: clipping shortens every step, the more the "
                    "larger the model. Leave it out",
                )
            return

    def waits(self, name: str, fresh: int) -> bool:
        """Return whether no optimizer has applied the last of a parameter's exchanges."""
        return fresh > self._applied.get(name, 0)

    def _repeat(self, optimizer: torch.optim.Optimizer, hook: Hook) -> None:
        """Warn if several exchanges of a parameter precede many of the steps that move it.

        The method's state then has a part of gradients that were exchanged twice or discarded. A
        single step after several exchanges is the next one after a step that the job left out.
        """
        texts = []
        for name, _ in self._moves(optimizer):
            fresh = hook._fresh(name)
            count, self._applied[name] = fresh - self._applied.get(name, 0), fresh
            self._repeats[name] = self._repeats.get(name, 0) + 1 if count > 1 else 0
            often, all_steps = self._often.get(name, (0, 0))
            often, all_steps = self._often[name] = often + (count > 1), all_steps + 1
            if self._repeats[name] >= REPEATED:
                texts.append(f"{name} {count} times per step")
            elif often >= OFTEN and often >= SHARE * all_steps:
                texts.append(f"{name} several times before {often} of {all_steps} steps")
        if not texts:
            return
        self._warn(
            "repeat",
            f"the hook exchanges the gradient of {texts[0]} of "
            f"{type(optimizer).__name__}, and the method's residuals, momentum or update rule keep "
            "a part of each. If the job accumulates gradients under DDP, run all forward and "
            "backward passes but the last under model.no_sync(). If it discards some, as a GAN, an "
            "adversarial attack or SAM does, run those passes under no_sync(), or freeze the "
            "parameters by requires_grad_(False), or use torch.autograd.grad. An optimizer that "
            'evaluates a closure several times needs memory="none"',
        )

    def returned(self) -> None:
        """Count exchanges and steps from the state that the hook has loaded."""
        hook = self._hook()
        if hook is not None:
            self._applied = {name: hook._fresh(name) for name in self._applied}

    def warn_unapplied(self) -> None:
        """Warn if a state is saved between the exchange of a gradient and its step."""
        hook = self._hook()
        if hook is None or not hook._remembers:
            return
        names = [name for name in self._applied if self.waits(name, hook._fresh(name))]
        if names:
            self._warn(
                "unapplied",
                f"the hook's state is saved at step {hook.step}, and no optimizer has "
                f"applied the last exchanged gradient of {names[0]}. A job that resumes from it "
                "loses that gradient, or counts a part of it twice. Save after optimizer.step(). "
                "If the job left that step out, nothing is wrong",
                4,
            )

    def _count(self, optimizer: torch.optim.Optimizer, exchanges: int) -> None:
        """Warn if an optimizer steps again and again and no gradient passes the hook.

        Steps with the rate 0 do not count: torch makes them to initialize an optimizer's state.
        """
        if exchanges != self._last.get(optimizer, self._began):
            self._last[optimizer] = exchanges
            self._idle.pop(optimizer, None)
            return
        if not any(rate for _, rate in self._moves(optimizer)):
            return
        count = self._idle[optimizer] = self._idle.get(optimizer, 0) + 1
        if count >= IDLE:
            self._warn(
                "idle",
                f"{type(optimizer).__name__} made {count} steps, and no gradient passed through "
                f"the hook, which is at step {exchanges}: nothing is compressed, and unless "
                "something else averages the gradients, the ranks drift apart. Run the forward "
                f"pass of the model on which the hook is registered: {self._kind.BYPASSED}",
            )

    def _check_scaler(self, scaler: Any, optimizer: Any) -> None:
        """Warn if a GradScaler other than `scaler` scales gradients of the parameters."""
        if scaler is self.scaler or self._hook() is None:
            return
        groups = getattr(optimizer, "param_groups", ())
        if not any(id(p) in self._names for group in groups for p in group["params"]):
            return
        if self.scaler is not None and self.scaler.get_scale() == scaler.get_scale():
            return  # the user's scaler may contain this one
        self._warn(
            "scaler",
            f"a GradScaler with the scale {scaler.get_scale():g} that the hook does not follow "
            f"steps {type(optimizer).__name__}: residuals, if the method has them, are in units of "
            "scaled gradients and wrong after each change of the scale. Pass it to the hook or to "
            "register: scaler=scaler",
            4,
        )

    def _compare(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn if another optimizer moves a parameter at a rate that is not followed."""
        moved = [*self._moves(optimizer)]
        followed = self.of([name for name, _ in moved])
        for (name, rate), expected in zip(moved, followed, strict=True):
            if expected is None or not math.isclose(rate, expected, rel_tol=1e-6):
                self._warn(
                    "rate",
                    f"an optimizer that the hook does not follow ({type(optimizer).__name__}) "
                    f"moves {name} with the learning rate {rate:g}; the hook follows "
                    f"{'none' if expected is None else f'{expected:g}'} for it. Pass all "
                    "optimizers: optimizer=[first, second]. For one that replaces another, "
                    f"{self._kind.REPLACED}",
                )
                return

    def of(
        self, names: Sequence[str], stepped: torch.optim.Optimizer | None = None
    ) -> list[float | None]:
        """Return the rate of each parameter, by name; None for one that no optimizer has.

        `stepped`: look only in this optimizer; None: in all of them.

        Raises:
            UsageError: a group lacks a rate, or has one that is negative or not finite.
        """
        if not self.optimizers:
            return [self.assigned] * len(names)
        rates: dict[str | None, float] = {}
        for optimizer in self.optimizers if stepped is None else [stepped]:
            for group in optimizer.param_groups:
                if group.get("lr") is None:
                    raise UsageError(
                        f"{type(optimizer).__name__} has a parameter group without 'lr'. Set "
                        "hook.lr at each step instead of optimizer="
                    )
                rate = checked_rate(group["lr"])
                rates |= {self._names.get(id(parameter)): rate for parameter in group["params"]}
        return [rates.get(name) for name in names]

    def check_shared(self, names: Sequence[str]) -> None:
        """Check that optimizers that move the same parameter have the same rate for it.

        Raises:
            UsageError: they have not, and a residual can follow only one rate; or see `of`.
        """
        first: dict[str, float] = {}
        for optimizer in self.optimizers if len(self.optimizers) > 1 else ():
            for name, rate in zip(names, self.of(names, optimizer), strict=True):
                if rate is not None and first.setdefault(name, rate) != rate:
                    raise UsageError(
                        f"two optimizers move {name}, at the learning rates {first[name]:g} and "
                        f"{rate:g}, and its residual can follow only one. Set hook.lr at each step "
                        "instead of optimizer=, or pass only the optimizer that moves it most"
                    )

    @property
    def scale(self) -> float | None:
        """The loss scale; None without a scaler.

        Raises:
            UsageError: it is not above 0 or not finite.
        """
        if self.scaler is None:
            return None
        scale = float(self.scaler.get_scale())
        if not 0 < scale < float("inf"):
            raise UsageError(f"loss scale {scale!r}: expected a finite number above 0")
        return scale

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the present sources, and stops observing later ones."""
        sources = self.optimizers, self.scaler, self._names
        count = len(self._handles)

        def restore() -> None:
            self.optimizers, self.scaler, self._names = sources
            for handle in self._handles[count:]:
                handle.remove()
            del self._handles[count:]

        return restore

    def close(self) -> None:
        """Stop observing the optimizers' steps."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def checked_policy(on_nonfinite: str | None, scaler: Any) -> str:
    """Return what to do at gradients that are not finite; None: "skip" if the scaler skips steps.

    Raises:
        UsageError: "skip" with a disabled scaler, which would apply the NaN of a skipped step.
    """
    enabled = scaler is not None and getattr(scaler, "is_enabled", lambda: True)()
    if on_nonfinite == "skip" and scaler is not None and not enabled:
        raise UsageError(
            'on_nonfinite="skip" with a disabled GradScaler: it steps at every gradient, so the '
            'NaN of a skipped step would reach all parameters. Use on_nonfinite="stop", or leave '
            "on_nonfinite out: it follows the scaler"
        )
    return on_nonfinite or ("skip" if enabled else "stop")


def plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return an optimizer without the wrappers of a framework, which have no step hooks."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    while isinstance(optimizer, torch.optim.Optimizer) and not hasattr(optimizer, STEP_HOOKS):
        inner = getattr(optimizer, "optim", None)  # as in PostLocalSGDOptimizer
        if not isinstance(inner, torch.optim.Optimizer):
            raise UsageError(
                f"{type(optimizer).__name__} has no step hooks, because it does not call "
                "torch.optim.Optimizer.__init__. Pass the optimizer that it wraps, or set hook.lr "
                "at each step instead of optimizer="
            )
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer={optimizer!r:.80}: expected a torch.optim.Optimizer, or a list of them"
        )
    return optimizer
