"""Local steps in a user's training loop: `gcbench.local_steps(model, optimizer, ..., every=15)`.

Each rank trains its own copy of a plain module with its own optimizer, without communication. After
every `every` optimizer steps, a round, the ranks exchange the differences between the last common
parameters x and theirs by a compressor. An outer SGD uses the mean as the gradient at x: with a
learning rate of 1 and no momentum it averages the parameters (McMahan et al. 2017,
arXiv:1602.05629); with 0.7, 0.9 and Nesterov momentum it is DiLoCo (Douillard et al. 2023,
arXiv:2311.08105, algorithm 1). All ranks start the next round at the new x. With `fragments`,
`delay` and `blend` parts of the model are exchanged in turn (`gcbench.core.fragments`).

The result equals `gcbench run --local-steps` on the same examples, bit for bit.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gcbench.core import sealed
from gcbench.core.clock import Totals
from gcbench.core.compressor import Compressor
from gcbench.core.errors import DivergedError, GcbenchError, PeerLostError, UsageError
from gcbench.core.exchange import Lane, classifier, dense_tensors, lane_of
from gcbench.core.fragments import Rounds, of_names
from gcbench.integrations import agreement, handshake, steps
from gcbench.integrations.agreement import Common
from gcbench.integrations.handshake import Roster
from gcbench.integrations.hook import Hook, HookSettings, RankState, observe_loads
from gcbench.integrations.hook_world import HookWorld
from gcbench.integrations.level import Level
from gcbench.integrations.rates import Rates, plain

UNCOUNTED = 2
"""Steps of other optimizers in succession at which `LocalSteps` warns."""
HINT = (
    ", or has made fewer optimizer steps: each rank calls optimizer.step() equally often, also "
    "where it has no batch; a step that a GradScaler skips on one rank is missing there"
)
"""A possible cause why a rank does not arrive at a round."""


SUMMARIZED = (
    *("every", "dense_last", "outer_lr", "fragments", "delay", "blend"),
    *("outer_momentum", "outer_nesterov"),
)
"""Settings that all ranks must share, besides those of every hook."""


@dataclass(frozen=True, kw_only=True)
class Settings(HookSettings):
    """The arguments of `local_steps`."""

    every: int
    fragments: int
    delay: int
    blend: float
    dense_last: bool
    outer_lr: float
    outer_momentum: float
    outer_nesterov: bool

    @property
    def rounds(self) -> Rounds:
        """When fragments are exchanged."""
        return Rounds(self.every, self.fragments, self.delay)

    def check(self) -> None:
        """Raise UsageError for values that do not work together."""
        if not self.every:
            raise UsageError("every=0: expected at least 1 optimizer step per round")
        try:
            self.rounds.check("every")
        except ValueError as error:
            raise UsageError(str(error)) from None
        if self.blend >= 1:
            raise UsageError(f"blend={self.blend}: expected at least 0, below 1")
        if not self.outer_lr:
            raise UsageError("outer_lr=0: expected above 0, or the parameters never move")
        if self.outer_momentum >= 1:
            raise UsageError(
                f"outer_momentum={self.outer_momentum}: expected at least 0, below 1, or its "
                "average grows without bound"
            )
        for method in self.methods.values():
            if not method.rule.plain:
                raise UsageError(
                    f"{method!r} has an update rule for gradients, and local steps exchange "
                    "differences of parameters. Use gcbench.comm_hook"
                )
        if self.memory.has_momentum:
            raise UsageError(
                f"memory={self.memory!r} applies a momentum to gradients, and local steps exchange "
                "differences of parameters. Use outer_momentum, and memory residual or none"
            )
        if self.outer_nesterov and not self.outer_momentum:
            raise UsageError("outer_nesterov=True needs outer_momentum above 0")

    def check_default_rate(self) -> None:
        """Raise UsageError for a method whose directions must not have the default `outer_lr`."""
        for method in self.methods.values():
            if method.claims.aggregate != "mean":
                raise UsageError(
                    f"{method!r} applies directions of length 1, not a mean, and local_steps would "
                    "apply them to the parameters with outer_lr 1: pass outer_lr, such as 0.001"
                )


def local_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    compressor: str | Compressor,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    blend: float = 0.0,
    memory: str | None = None,
    memory_options: Mapping[str, Any] | None = None,
    collective: str | None = None,
    dense_below: int = 0,
    dense_last: bool = False,
    start_step: int = 0,
    seed: int = 0,
    outer_lr: float | None = None,
    outer_momentum: float = 0.0,
    outer_nesterov: bool = False,
    timeout: float = 1800.0,
    state: Mapping[str, Any] | None = None,
    **options: Any,
) -> LocalSteps:
    """Exchange parameters of a plain module after every `every` steps of its optimizer.

    All ranks of the job call it, with equal parameters. The loop then calls `optimizer.step()` as
    before. Call `exchange()` after the last step, unless their number is a multiple of `every` and
    `fragments`, `delay` and `blend` have their defaults. Buffers, such as the running statistics of
    BatchNorm, are not averaged.

    Args:
        model: the module, without DistributedDataParallel.
        optimizer: the optimizer of its parameters; it keeps its state between rounds. Of several,
            pass the one that steps last. Another one that replaces it is named in a warning.
        compressor: a registered name (`gcbench list compressors`), a file (./mine.py), or a
            compressor.
        every: optimizer steps per round.
        fragments: parts of the model that are exchanged in turn, each once per round; divides
            `every`.
        delay: steps until a rank takes over the result of an exchange; below every / fragments.
        blend: share of a rank's own parameters that stays when it does, at least 0 and below 1.
        memory: name or file of the memory; default the method's.
        memory_options: fields of the memory.
        collective: one of the method's legal ones; default the first of them.
        dense_below: tensors of fewer elements stay in fp32.
        dense_last: the last layer stays in fp32.
        start_step: exchanges before this step are in fp32.
        seed: of random numbers; models trained at the same time should have different ones.
        outer_lr: learning rate of the outer SGD, above 0; default 1. Required for methods such as
            `signsgd` and `demo`, which exchange directions instead of a mean.
        outer_momentum: its momentum, at least 0 and below 1.
        outer_nesterov: whether it is Nesterov's.
        timeout: seconds that a rank waits for the others in this call and in a collective. Ranks
            may be at different steps of a round, so it must exceed the time of a round.
        state: the `state_dict` of this rank to resume from. Load the states of the model and the
            optimizer first, saved at the same step: other parameters are refused.
        options: fields of the compressor, each a value or a schedule by step.

    Raises:
        gcbench.core.errors.UsageError: an invalid argument, a model that cannot be compressed, or
            ranks with different settings or parameters.
        gcbench.core.errors.PeerLostError: another rank did not call it.
    """
    call = {**locals(), "outer_lr": 1.0 if outer_lr is None else outer_lr}
    settings = Settings.of_call(call)
    settings.check()
    if outer_lr is None:
        settings.check_default_rate()
    if isinstance(optimizer, list | tuple):
        raise UsageError(
            "optimizer is a list, and local_steps counts the steps of one optimizer. Pass the one "
            "that steps last"
        )
    if hasattr(optimizer, "averager"):
        raise UsageError(
            f"{type(optimizer).__name__} averages the parameters itself, in full precision. Create "
            "and step only the optimizer that it wraps, and pass that one"
        )
    optimizer = plain(optimizer)
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        raise UsageError(
            "ZeroRedundancyOptimizer sends the parameters that a rank updates to all others at "
            "each step, so no step is local. Pass a plain "
            f"{type(optimizer.optim).__name__}(model.parameters(), ...)"  # type: ignore[attr-defined]
        )
    if isinstance(model, DistributedDataParallel):
        raise UsageError(
            "DistributedDataParallel averages gradients at every step. Pass the plain module"
        )
    return LocalSteps(settings, model, optimizer, state)


class LocalSteps(Hook):
    """One model's rounds of local steps, created by `local_steps`."""

    CALL = "gcbench.local_steps"
    FORMAT = 2

    def __init__(
        self,
        settings: Settings,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: Mapping[str, Any] | None,
    ) -> None:
        """Meet the other ranks, and observe the optimizer's steps."""
        super().__init__(settings, Rates(None, None))
        self._model, self._optimizer = model, optimizer
        self._step = self._since = 0
        self._uncounted = 0
        """Steps of other optimizers since the last one of this optimizer, or the last exchange."""
        self._beside = False
        """Whether an optimizer of further parameters has stepped since then."""
        self._warned: set[str] = set()
        """Kinds of warnings so far: each is issued once."""
        self._saved = False
        """Whether a state was saved or loaded after the last step."""
        self._initializes = False
        """Whether the current step only initializes the optimizer's state."""
        self._unloaded: str | None = None
        """Digest of the parameters before the model loaded a state, until the next step."""
        self._overwritten = False
        """Whether a state that the model loaded had other parameters."""
        group = dist.group.WORLD
        if group is None:
            raise UsageError(
                "gcbench.local_steps needs a process group: call "
                'torch.distributed.init_process_group("gloo") first, or "nccl" on GPUs'
            )
        self._size = group.size()
        if state is not None:
            self._keep(state)

        def meet(refused: str) -> tuple[Store, Roster]:
            summary, which = dict(self._summary), "initial" if state is None else "common"
            if not refused:
                summary[f"{which} parameters (SHA-256)"] = self._origin
                frozen = [p.data for p in model.parameters() if not p.requires_grad]
                plain = [x for x in frozen if type(x) is Tensor]
                summary["frozen parameters (digest)"] = agreement.digest_of(plain)
            patience, roster = self._patience, Roster.alone()
            return handshake.meet(group, summary, refused, patience, roster, call=self.CALL)

        store, roster = self._prepare_and_meet(lambda: self._prepare(model, group), meet)
        with self._exchanging():
            self._level.world.connect(store, roster)
        self._handles: list[Any] = [
            optimizer.register_step_post_hook(steps.uncompiled(lambda *_: self._stepped())),
            steps.after_optimizers(self, LocalSteps._other_stepped),
            optimizer.register_step_pre_hook(steps.uncompiled(lambda *_: self._before_step())),
            observe_loads(model, self._before_load),
        ]

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    @property
    def lr(self) -> float:
        """The learning rate that residuals follow: that of the outer SGD."""
        return float(self.settings.outer_lr)

    @lr.setter
    def lr(self, rate: float) -> NoReturn:
        raise UsageError(f"lr={rate!r}: residuals follow outer_lr, which is constant")

    @property
    def plain_bytes(self) -> float:
        """Bytes that this rank would have sent in fp32 by exchanging gradients at every step."""
        return 4.0 * self._step * self._level.numel

    def close(self) -> None:
        """Stop observing the optimizer, and end the process group.

        It warns if steps since the last exchange are neither exchanged nor saved in a state.
        """
        if self._closed:
            return
        self._closed = True
        for handle in self._handles:
            handle.remove()
        world, steps_open = self._level.world, self._open
        unsaved = steps_open and self._size > 1 and not self._saved and self._failed is None
        text = (
            f"rank {world.rank}: close() after {self._step} optimizer steps, and the last "
            f"{steps_open} are not completely exchanged, so the ranks have different parameters. "
            "Call exchange() first; or save state_dict(), to resume in the middle of the round"
        )
        if unsaved:
            with suppress(PeerLostError):  # a rank with more steps may wait for this one
                world.report(UsageError(text))
        world.close()
        if unsaved:
            warnings.warn(text, stacklevel=2)

    # -- registration ------------------------------------------------------------------------------

    def _prepare(self, model: nn.Module, group: dist.ProcessGroup) -> Mapping[str, Tensor]:
        """Make the exchange, without its process group; return the parameters by name."""
        settings = self.settings
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named or any(p.dtype != torch.float32 for p in named.values()):
            raise UsageError(
                f"a {type(model).__name__} with float32 parameters that require a gradient is "
                "expected: differences of parameters are exchanged in float32"
            )
        if any(hasattr(p, "to_local") for p in named.values()):
            raise UsageError(
                "the parameters are sharded (DTensors), and local steps need whole ones on every "
                "rank. Use gcbench.shard_hook, or leave fully_shard out"
            )
        if not {id(p) for p in named.values()} & _parameters(self._optimizer):
            raise UsageError(
                "the optimizer has none of the model's parameters, so its steps would not change "
                "what is exchanged. Create it from model.parameters(), and pass that one"
            )
        outside = len(_parameters(self._optimizer) - {id(p) for p in model.parameters()})
        if outside:
            warnings.warn(
                f"parameters of the optimizer that the model lacks: {outside}. Local steps do not "
                "exchange them, so the ranks will differ. Pass a module with all of them",
                stacklevel=5,
            )
        device = next(iter(named.values())).device
        handshake.check_backend("the default", group, device)
        shapes = {name: tuple(p.shape) for name, p in named.items()}
        last = classifier(model) if settings.dense_last else []
        dense = dense_tensors([*named], [*shapes.values()], settings.dense_below, last)
        # The order of `gcbench run`: by fragment the compressed parameters, then those in fp32.
        kinds = [*zip(of_names([*named], settings.fragments), dense, strict=True)]
        groups = [
            (kind[1], [name for name, k in zip(named, kinds, strict=True) if k == kind])
            for kind in sorted({*kinds})
        ]
        self._fragments = [fragment for fragment, _ in sorted({*kinds})]
        """The fragment of each lane."""
        self._names = [name for _, names in groups for name in names]
        self._parameters = [named[name] for name in self._names]
        self._common_x = [p.detach().clone() for p in self._parameters]
        self._origin = _digest(self._common_x)
        """Digest of the common parameters at registration, or of the last loaded state."""
        self._outer = torch.optim.SGD(
            self._common_x,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            nesterov=settings.outer_nesterov,
        )

        def lanes(step: int, skipped: int) -> list[Lane]:
            result: list[Lane] = []
            for is_dense, names in groups:
                start = sum(lane.segments.numel for lane in result)
                exact = is_dense or settings.warms_up(step, skipped)
                parts = [shapes[name] for name in names]
                result.append(lane_of(parts, start, *settings.at(step), exact=exact))
            return result

        self._level = Level(
            self._world_of(group, device),
            lanes,
            settings.stages,
            [[(name, named[name].numel()) for name in names] for _, names in groups],
            settings.seed,
            Totals(device),
        )
        self._level.world.hint = HINT
        layout = [(name, shapes[name]) for name in self._names]
        self._summary = {
            **self._summarize(len(named), self._level.numel, layout),
            **{field: getattr(settings, field) for field in SUMMARIZED},
        }
        return {}

    def _follow_steps(self, parameters: Mapping[str, Tensor]) -> None:
        """Do nothing: residuals follow the constant rate of the outer SGD."""

    def _levels(self) -> list[Level]:
        return [self._level]

    def _worlds(self) -> list[HookWorld]:
        return [self._level.world]

    # -- rounds ------------------------------------------------------------------------------------

    def _before_step(self) -> None:
        if steps.is_part(self._optimizer):
            return
        self._initializes = _initializes(self._optimizer)
        if not self._initializes:
            self._compare_loaded()

    def _stepped(self) -> None:
        """Count an optimizer step; exchange a fragment, and take one over, if it is their turn."""
        if self._initializes or steps.is_part(self._optimizer):
            return
        self.raise_failure()
        settings, rounds = self.settings, self.settings.rounds
        if self._step and self._step in settings.stages:
            self._level.exchange.change(self._level.lanes(self._step, 0))
        self._step += 1
        self._since += 1
        self._uncounted, self._beside, self._saved = 0, False, False
        sent = rounds.sent(self._step)
        if sent:
            self._send(sent)
        if settings.delay < self._since:  # otherwise `exchange` was called in between
            self._take_over(rounds.taken(self._step), settings.blend)
        if sent and settings.fragments == 1 and not (settings.delay or settings.blend):
            self._since = 0

    def _other_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn, once, if another optimizer replaces the one whose steps are counted.

        An optimizer of other parameters of the model does not, nor does one inside this one.
        """
        if optimizer is self._optimizer or not self._active:
            return
        counted, moved = _parameters(self._optimizer), _parameters(optimizer, moved=True)
        pairs = zip(self._names, self._parameters, strict=True)
        trained = {n: id(p) in counted for n, p in pairs if id(p) in moved and p.grad is not None}
        names = [name for name, shared in trained.items() if shared]
        if not names:
            self._beside |= bool(trained)
            self._saved &= not trained
            return
        self._uncounted += 1
        self._saved = False
        if self._uncounted >= UNCOUNTED and "optimizer" not in self._warned:
            self._warned.add("optimizer")
            warnings.warn(
                f"another optimizer ({type(optimizer).__name__}) moves {names[0]}, and the one "
                f"that gcbench.local_steps counts ({type(self._optimizer).__name__}) has not "
                f"stepped since step {self._step}: nothing is exchanged, and the ranks drift "
                "apart. To train with another optimizer, pass it to a new call: state = "
                "rounds.state_dict(), rounds.close(), gcbench.local_steps(model, new, ..., "
                "state=state)",
                stacklevel=4,
            )

    def exchange(self) -> None:
        """Exchange what remains, if the ranks have made a step since; then all ranks are equal.

        All ranks call it, also those without such a step. As after the last step of a run,
        fragments that were sent within `delay` steps are not sent again.

        Raises:
            gcbench.core.errors.DivergedError: a rank's parameters are not finite: on every rank.
            gcbench.core.errors.UsageError: the ranks are at different steps, or their means differ:
                on every rank; or `close` was called.
            gcbench.core.errors.PeerLostError: another rank failed or did not answer in time.
        """
        self.raise_failure()
        if self._closed:
            raise UsageError(
                "exchange() after close(), which ended the process group: call it first"
            )
        last = max(0, self._step - 1)
        values = {"position": "call of exchange()", "step": last, "open steps": self._open}
        with self._exchanging():
            self._require(None, values)
        if not self._open:
            return
        settings = self.settings
        sent = settings.rounds.recent(self._step, min(settings.delay + 1, self._since))
        if rest := {*self._fragments} - sent:
            self._send(rest)
        self._take_over(self._fragments, 0.0)
        self._since, self._uncounted, self._beside = 0, 0, False

    @property
    def _open(self) -> int:
        """Steps since the last complete exchange."""
        return self._since + self._uncounted or int(self._beside)

    def _send(self, fragments: Collection[int]) -> None:
        """Exchange fragments, and update their common parameters."""
        with self._exchanging():
            self._round(fragments)

    def _require(self, error: GcbenchError | None, values: Mapping[str, Any]) -> None:
        """Raise the error of any rank, or the difference of values, on every rank."""
        if (error := self._agree([self._level], error, Common(values))) is not None:
            raise error

    @torch.no_grad()
    def _take_over(self, fragments: Collection[int], blend: float) -> None:
        """Set parameters of fragments to `blend` times theirs plus 1 - `blend` times the common."""
        chosen = self._in(fragments)
        for name, x, parameter in zip(self._names, self._common_x, self._parameters, strict=True):
            if name in chosen and blend:
                parameter.mul_(blend).add_(x, alpha=1 - blend)
            elif name in chosen:
                parameter.copy_(x)

    def _in(self, fragments: Collection[int]) -> set[str]:
        """Return the names of the parameters of fragments."""
        pairs = zip(self._level.names, self._fragments, strict=True)
        return {name for names, fragment in pairs if fragment in fragments for name in names}

    def _round(self, fragments: Collection[int]) -> None:
        level, step = self._level, self._step - 1
        pairs = zip(self._common_x, self._parameters, strict=True)
        difference = torch.cat([(x.reshape(-1) - p.reshape(-1)) for x, p in pairs])
        error: GcbenchError | None = self._replaced()
        sizes = [parts[-1].stop for parts in level.parts]
        for number, part in enumerate(torch.split(difference, sizes)):
            error = error or level.diverged(number, part, step, _diverged)
        common = self._common("exchange of local steps", step, [level])
        level.world.place[0] = f"the exchange after {self._step} optimizer steps"
        self._require(error, {**common.values, "common parameters (SHA-256)": self._origin})
        lanes = [i for i, fragment in enumerate(self._fragments) if fragment in fragments]
        mean = level.exchange.mean([difference], step, self.settings.outer_lr, lanes)
        chosen = self._in(fragments)
        pieces = torch.split(mean, [x.numel() for x in self._common_x])
        for name, x, piece in zip(self._names, self._common_x, pieces, strict=True):
            x.grad = piece.view_as(x) if name in chosen else None
        sent = torch.cat([x.grad.view(-1) for x in self._common_x if x.grad is not None])
        mean_bits = agreement.digest(sent)
        self._require(None, {"position": "end of a round", "step": step, "mean": mean_bits})
        self._outer.step()
        self._outer.zero_grad()

    def _before_load(self, model: nn.Module) -> None:
        """Remember the parameters before `model.load_state_dict`."""
        if self._unloaded is None:
            self._unloaded = _digest(self._parameters)

    def _compare_loaded(self) -> None:
        """Note whether `model.load_state_dict` changed parameters and nothing restored them."""
        if self._unloaded is not None:
            self._overwritten |= _digest(self._parameters) != self._unloaded
            self._unloaded = None

    def _replaced(self) -> UsageError | None:
        """Return an error if something replaced parameters; warn about further ones."""
        self._compare_loaded()
        if self._overwritten:
            return UsageError(
                f"rank {self._level.world.rank}: model.load_state_dict changed parameters after "
                "gcbench.local_steps was called, and the exchange would send the change as if "
                "training had made it. Load first, then call gcbench.local_steps. To return to an "
                "earlier step also load its rounds.state_dict(), or call rounds.close() and "
                "gcbench.local_steps again"
            )
        registered = dict(zip(self._names, self._parameters, strict=True))
        present = dict(self._model.named_parameters(remove_duplicate=False))
        numbers = {id(p) for p in present.values()}
        names = [
            name
            for name, p in registered.items()
            if present.get(name, p) is not p and id(p) not in numbers
        ]
        if names:
            return UsageError(
                f"rank {self._level.world.rank}: {', '.join(names[:3])} of the model is another "
                "parameter object than when gcbench.local_steps was called, so an exchange would "
                "not reach the model. Replace parameters first, then create the optimizer and "
                "call gcbench.local_steps"
            )
        numbers = {id(p) for p in registered.values()}
        names = [name for name, p in present.items() if p.requires_grad and id(p) not in numbers]
        if names and "parameters" not in self._warned:
            self._warned.add("parameters")
            warnings.warn(
                f"{', '.join(names[:3])} did not exist or did not require a gradient when "
                "gcbench.local_steps was called, and does now. It is not exchanged, so it will "
                "differ between ranks. Call gcbench.local_steps after such changes",
                stacklevel=2,
            )
        return None

    # -- state -------------------------------------------------------------------------------------

    def _state(self) -> RankState:
        self._saved = True
        entry = {
            "step": self._step,
            "since": self._since,
            "model": _digest(self._parameters),
            "parameters": [x.cpu().clone() for x in self._common_x],
            **self._moments(),
            "exchange": self._level.exchange.state_dict(),
        }
        return self._sealed(self._level.world.ranks[0], entry)

    def _moments(self) -> dict[str, list[Any]]:
        """Return the outer momentum of each parameter, with the same entries at every step.

        A template for `torch.distributed.checkpoint` is saved before the first round, where "begun"
        is false and the momentum zeros.
        """
        if not self.settings.outer_momentum:
            return {"momentum": [None for _ in self._common_x]}
        moments = [self._outer.state[x].get("momentum_buffer") for x in self._common_x]
        pairs = zip(self._common_x, moments, strict=True)
        return {
            "momentum": [
                torch.zeros_like(x).cpu() if m is None else m.cpu().clone() for x, m in pairs
            ],
            "begun": [m is not None for m in moments],
        }

    def _saved_moments(self, entry: Mapping[str, Any]) -> list[Tensor | None]:
        """Return the checked outer momentum of each parameter in a state; None: not begun.

        States of earlier versions have None instead of zeros, and no "begun".
        """
        count = len(self._common_x)
        moments = sealed.sequence("momentum", sealed.entry(entry, "momentum"), count)
        flags = entry.get("begun", [moment is not None for moment in moments])
        begun = sealed.sequence("begun", flags, count)
        pairs = zip(self._names, self._common_x, moments, strict=True)
        for (name, x, moment), flag in zip(pairs, begun, strict=True):
            if flag or moment is not None:
                sealed.floats(f"momentum of {name}", moment, x.shape)
        return [moment if flag else None for moment, flag in zip(moments, begun, strict=True)]

    def _adopt(self, state: Mapping[str, Any]) -> None:
        entry = self._entry(state, self._level.world.ranks[0], self._size)
        step = sealed.integer("step", sealed.entry(entry, "step"), 0, sealed.STEPS)
        since = sealed.integer("since", sealed.entry(entry, "since"), 0, sealed.STEPS)
        count = len(self._common_x)
        parameters = sealed.sequence("parameters", sealed.entry(entry, "parameters"), count)
        for name, x, value in zip(self._names, self._common_x, parameters, strict=True):
            sealed.floats(name, value, x.shape)
        moments = self._saved_moments(entry)
        expected, received = sealed.entry(entry, "model"), _digest(self._parameters)
        if received != expected:
            raise UsageError(
                f"the model's parameters (SHA-256 {received:.12}) are not those that this rank had "
                f"when it saved the state (SHA-256 {expected!s:.12}). Save the states of the model "
                "and of local steps at the same step, and load the model's first"
            )
        exchange = self._level.make(step)
        exchange.load_state_dict(sealed.entry(entry, "exchange"))
        self._level.exchange, self._step, self._since = exchange, step, since
        self._uncounted, self._beside, self._saved = 0, False, True
        self._unloaded, self._overwritten = None, False
        with torch.no_grad():
            for x, value, moment in zip(self._common_x, parameters, moments, strict=True):
                x.copy_(value)
                self._outer.state[x].pop("momentum_buffer", None)
                if moment is not None:
                    self._outer.state[x]["momentum_buffer"] = moment.to(x.device).clone()
        self._origin = _digest(self._common_x)


def _diverged(rank: int, name: str, step: int) -> DivergedError:
    """Return the error for a parameter that is not finite."""
    return DivergedError(
        f"rank {rank}: {name} is not finite after {step + 1} optimizer steps. Lower the learning "
        "rate; or leave out steps whose gradients are not finite, on all ranks or on none",
        step,
    )


def _parameters(optimizer: torch.optim.Optimizer, *, moved: bool = False) -> set[int]:
    """Return the ids of an optimizer's parameters; `moved`: without those that have the rate 0."""
    groups = (group for group in optimizer.param_groups if not moved or group.get("lr") != 0)
    return {id(p) for group in groups for p in group["params"]}


def _initializes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step would only initialize an optimizer's state.

    `torch.distributed.checkpoint` makes such a step before it saves or loads an empty state: with
    the rate 0, and zeros as the gradient of every parameter.
    """
    if optimizer.state or any(group.get("lr") != 0 for group in optimizer.param_groups):
        return False
    trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
    return all(p.grad is not None and not p.grad.any() for p in trained)


def _digest(tensors: Sequence[Tensor]) -> str:
    """Return a SHA-256 of the bits of float32 tensors."""
    hashed = hashlib.sha256()
    for x in tensors:
        hashed.update(x.detach().cpu().contiguous().reshape(-1).numpy().data)
    return hashed.hexdigest()
