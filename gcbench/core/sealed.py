"""Saved states: a digest over their content, and checks of each kind of value.

A state consists of dicts with string keys, lists, tensors, numbers, strings, booleans and None.
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
"""Steps, which address random numbers, are below this."""
REMEDY = "Load a state that state_dict() returned for the same settings, rank and world size"


def malformed(what: str) -> UsageError:
    """Return the error for a saved state; `what`: the invalid value, and what is allowed."""
    return UsageError(f"the saved state does not match: {what}. {REMEDY}")


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with a SHA-256 of its content under the key "digest".

    A nested state with a digest enters by that digest, so each tensor is hashed once.
    """
    return {**state, "digest": _digest(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Raise UsageError if the content of a sealed state does not match its digest."""
    if state.get("digest") != _digest({k: v for k, v in state.items() if k != "digest"}):
        raise malformed(
            f"its digest {state.get('digest')!r:.16} does not match its content, which was "
            "modified or damaged after it was saved"
        )


def _digest(state: Mapping[str, Any]) -> str:
    hashed = hashlib.sha256()
    for part in _parts(state):
        hashed.update(part)
    return hashed.hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield the bytes of a value in a deterministic order."""
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
    """Return an entry of a state; UsageError if the state is not a mapping or lacks it."""
    if not isinstance(state, Mapping):
        raise malformed(f"a {type(state).__name__}: expected a mapping with {key!r}")
    if key not in state:
        raise malformed(f"the entry {key!r} is missing; it has {', '.join(map(str, state))}")
    return state[key]


def integer(name: str, value: Any, least: int, below: int) -> int:
    """Return an integer in `[least, below)`; UsageError for anything else."""
    if type(value) is not int or not least <= value < below:
        raise malformed(f"{name}={value!r}: expected an integer from {least} to {below - 1}")
    return value


def number(name: str, value: Any, *, positive: bool = False) -> float:
    """Return a finite number, at least 0 or above 0; UsageError for anything else."""
    right = type(value) in (int, float) and math.isfinite(value)
    if not right or value < 0 or (positive and value == 0):
        allowed = "above 0" if positive else "at least 0"
        raise malformed(f"{name}={value!r}: expected a finite number {allowed}")
    return float(value)


def sequence(name: str, value: Any, length: int) -> Sequence[Any]:
    """Return a list of this length; UsageError for anything else."""
    if not isinstance(value, list | tuple) or len(value) != length:
        received = f"{len(value)} entries" if isinstance(value, list | tuple) else repr(value)
        raise malformed(f"{name} has {received:.60}: expected a list of {length}")
    return value


def floats(name: str, value: Any, shape: Sequence[int]) -> Tensor:
    """Return a finite float32 tensor of this shape; UsageError for anything else."""
    if not isinstance(value, Tensor):
        raise malformed(f"{name} is {value!r:.40}: expected a float32 tensor")
    if value.dtype != torch.float32 or value.shape != torch.Size(shape):
        raise malformed(
            f"{name} is {value.dtype}, shape {tuple(value.shape)}: expected float32, shape "
            f"{tuple(shape)}"
        )
    if not value.isfinite().all():
        raise malformed(f"{name} contains values that are not finite")
    return value


def copied(value: Any) -> Any:
    """Return a copy of a state, including its tensors."""
    if isinstance(value, Mapping):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value
