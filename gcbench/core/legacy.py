"""Support for plug-ins that were written for the contract of version 0.1.

They run for one more release. A class that uses the old contract is adapted when it is defined,
with a `DeprecationWarning` that says what to write instead.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator
from functools import wraps
from typing import Any

from torch import Tensor

from gcbench.core.claims import Claims

CLAIMS = frozenset(name for name in vars(Claims) if not name.startswith("_"))
"""Attributes that a compressor had itself and that are now in its `claims`."""
WRITES = ("encode", "encode_feedback", "decode", "mean", "merge", "decode_sum")
"""Methods that now take `out`."""


class Forwarded(Claims[Any]):
    """The claims of an old class: its own attributes in `own`, and else its base class's claims."""

    def __init__(self, codec: Any, inherited: Claims[Any], own: frozenset[str]) -> None:
        self.codec, self._inherited, self._own = codec, inherited, own

    def __getattribute__(self, name: str) -> Any:
        if name not in CLAIMS:
            return super().__getattribute__(name)
        return getattr(self.codec if name in self._own else self._inherited, name)


def adapt(cls: Any) -> None:
    """Change a compressor class of the old contract, in place, into one of the present contract.

    Raises:
        TypeError: it overrides a method that the engine no longer calls.
    """
    own = vars(cls)
    gone = [name for name in ("encode_shards", "feedback_shards") if name in own]
    if gone:
        raise TypeError(
            f"{cls.__name__} overrides {gone[0]}, which is no longer called: declare `cuttable` "
            "and define `cut`, which cuts one payload into shards"
        )
    found = [
        *_claims(cls, own),
        *_writes(cls, own),
        *_statistic(cls, own),
        *_rounds(cls, own),
    ]
    if found:
        warnings.warn(
            f"{cls.__name__} is written for the contract of gcbench 0.1, which the next release "
            f"no longer reads: {'; '.join(found)}. CONTRIBUTING.md has the present contract",
            DeprecationWarning,
            stacklevel=4,
        )


def _claims(cls: Any, own: Any) -> list[str]:
    names = frozenset(CLAIMS & own.keys())
    if not names or "claims" in own:
        return []

    def claims(self: Any) -> Claims[Any]:
        return Forwarded(self, super(cls, self).claims, names)

    cls.claims = property(claims)
    return [f"{', '.join(sorted(names))} belong into `claims`"]


def _writes(cls: Any, own: Any) -> list[str]:
    found = []
    for name in WRITES:
        function = own.get(name)
        if inspect.isfunction(function) and not _takes_out(function):
            setattr(
                cls, name, _without_out(function, tensor=name in ("decode", "mean", "decode_sum"))
            )
            found.append(f"{name} takes `out`")
    return found


def _takes_out(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(each.name == "out" or each.kind is each.VAR_KEYWORD for each in parameters)


def _without_out(function: Callable[..., Any], *, tensor: bool) -> Callable[..., Any]:
    @wraps(function)
    def call(self: Any, *args: Any, out: Any = None, prepared: Any = None, **more: Any) -> Any:
        result = function(self, *args, **more)
        return out.copy_(result) if tensor and out is not None else result

    return call


def _statistic(cls: Any, own: Any) -> list[str]:
    if "statistic" not in own or "prepare" in own:
        return []
    from gcbench.core.compressor import Prepared

    def prepare(self: Any, x: Tensor, segments: Any) -> Prepared:
        return Prepared(self.statistic(x, segments))

    cls.prepare = prepare
    return ["`statistic` is now the first part of what `prepare` returns"]


def _rounds(cls: Any, own: Any) -> list[str]:
    if "contribute" not in own or "in_rounds" in own:
        return []

    def in_rounds(
        self: Any, x: Tensor, segments: Any, state: Tensor, key: Any, out: Tensor
    ) -> Generator[Tensor, Tensor, Tensor]:
        means: list[Tensor] = []
        for _ in range(self.rounds):
            means.append((yield self.contribute(x, segments, state, means)))
        out.copy_(self.reconstruct(means, segments))
        following: Tensor = self.next_state(means, segments, key)
        return following

    cls.in_rounds = in_rounds
    return ["contribute, reconstruct and next_state are one generator, `in_rounds`"]
