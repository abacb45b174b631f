"""Saved states: a digest over all that is in them, and the checks of each kind of value.

A state is what `torch.save` and JSON with tensors can hold: dicts with string keys, lists, tensors,
numbers, strings, booleans and None.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gcbench.core.errors import UsageError

STEPS = 2**32
"""Random numbers are addressed by steps below this."""
REMEDY = "Load a state that state_dict() returned for the same settings, rank and world size"
"""What to do about a state that does not fit."""


def malformed(what: str) -> UsageError:
    """Return the error for a saved state; `what`: the value that is wrong, and what is allowed."""
    return UsageError(f"the saved state does not fit: {what}. {REMEDY}")


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with a SHA-256 over its values, under the key "digest".

    A part that has a digest counts by it, so no tensor is hashed twice.
    """
    return {**state, "digest": _digest(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Raise UsageError if a value of a sealed state is not the one that was saved."""
    if state.get("digest") != _digest({k: v for k, v in state.items() if k != "digest"}):
        raise malformed(
            f"its digest is {state.get('digest')!r:.16}, which is not that of its values: it was "
            "changed or damaged after it was saved"
        )


def _digest(state: Mapping[str, Any]) -> str:
    hashed = hashlib.sha256()
    for part in _parts(state):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value, in an order that depends on nothing else."""
    if isinstance(value, Mapping):
        if isinstance(value.get("digest"), str):
            yield json.dumps(["sealed", value["digest"]]).encode()
            return
        yield json.dumps(sorted(map(str, value))).encode()
        for key in sorted(value, key=str):
            yield from _parts(value[key])
    elif isinstance(value, list | tuple):
        yield json.dumps(len(value)).encode()
        for each in value:
            yield from _parts(each)
    elif isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous()
        yield json.dumps([str(flat.dtype), list(flat.shape)]).encode()
        yield flat.reshape(-1).view(torch.uint8).numpy()
    else:
        yield json.dumps(value).encode()


# ---- the values of a state -----------------------------------------------------------------------


def entry(state: Any, key: str) -> Any:
    """Return an entry of a state; UsageError if the state is no mapping or lacks it."""
    if not isinstance(state, Mapping):
        raise malformed(f"a {type(state).__name__} stands where a mapping with {key!r} is expected")
    if key not in state:
        raise malformed(f"the entry {key!r} is missing; there are {', '.join(map(str, state))}")
    return state[key]


def integer(name: str, value: Any, least: int, below: int) -> int:
    """Return an integer from `least` on and below `below`; UsageError for anything else."""
    if type(value) is not int or not least <= value < below:
        raise malformed(f"{name}={value!r}: an integer from {least} to {below - 1} is allowed")
    return value


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return a finite number, at least 0 or above 0; UsageError for anything else."""
    right = type(value) in (int, float) and math.isfinite(value)
    if not right or value < 0 or (positive and value == 0):
        allowed = "above 0" if positive else "at least 0"
        raise malformed(f"{name}={value!r}: a finite number, {allowed}, is allowed")
    return float(value)


def sequence(name: str, value: Any, length: int) -> Sequence[Any]:
    """Return a list of this length; UsageError for anything else."""
    if not isinstance(value, list | tuple) or len(value) != length:
        found = f"{len(value)} entries" if isinstance(value, list | tuple) else repr(value)
        raise malformed(f"{name}: {found:.60} where a list of {length} is expected")
    return value


def floats(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """Return a finite float32 tensor of this shape; UsageError for anything else."""
    if not isinstance(value, Tensor):
        raise malformed(f"{name} is {value!r:.40}: a float32 tensor is expected")
    if value.dtype != torch.float32 or value.shape != torch.Size(shape):
        raise malformed(
            f"{name} is {value.dtype}, shape {tuple(value.shape)}: float32, shape {tuple(shape)}, "
            "is expected"
        )
    if not value.isfinite().all():
        raise malformed(f"{name} has values that are not finite")
    return value


def copied(value: Any) -> Any:
    """Return a state with copies of its tensors."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value
