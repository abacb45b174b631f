"""The schema of results on disk, which results/README.md explains: a run's summary, checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

SCHEMA = 1
METRIC_COLUMNS = (
    "kind",
    "step",
    "train_loss",
    "lr",
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "payload_bytes_up",
    "payload_bytes_down",
    "wire_bytes",
    "seconds",
)
"""Columns of metrics.parquet, in their order."""


class WrongValueError(ValueError):
    """A value that its field does not allow."""

    def __init__(self, expected: str, value: Any, place: str = "") -> None:
        super().__init__(expected)
        self.expected, self.value, self.place = expected, value, place


Check = Callable[[Any], Any]
"""Returns a value as its field stores it; raises WrongValueError for one that is not allowed."""


def _text(value: Any) -> str:
    if type(value) is not str:
        raise WrongValueError("a string expected", value)
    return sys.intern(value)


def _number(value: Any) -> float:
    if type(value) not in (float, int):
        raise WrongValueError("a number expected", value)
    try:
        return float(value)
    except OverflowError:
        raise WrongValueError("a number below 2^1024 expected", value) from None


def _bytes(value: Any) -> float:
    number = _number(value)
    if not number >= 0:
        raise WrongValueError("a number greater than or equal to 0 expected", value)
    return number


def _integer(least: int | None = None) -> Check:
    expected = (
        "an integer expected" if least is None else f"an integer of at least {least} expected"
    )

    def check(value: Any) -> int:
        right = type(value) is int or (type(value) is float and value.is_integer())
        if not right or (least is not None and value < least):
            raise WrongValueError(expected, value)
        return int(value)

    return check


def _mapping(value: Any) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise WrongValueError("an object expected", value)
    return value


def _seconds(value: Any) -> Mapping[str, float | None]:
    mapping = _mapping(value)
    if _SECONDS.issuperset(map(type, mapping.values())):
        return mapping  # rows of a file share it
    return {name: None if one is None else _number(one) for name, one in mapping.items()}


_SECONDS = frozenset((float, type(None)))


def _optional(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _share(value: Any) -> float:
    number = _number(value)
    if math.isfinite(number) and not 0 <= number <= 1:
        raise WrongValueError("a number from 0 to 1 expected", value)
    return number


def _number_or_none(value: Any) -> float | None:
    return value if value is None or type(value) is float else _number(value)


def _checked(data: Mapping[str, Any], checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return the checked fields of an object; the error of a wrong one has its place."""
    values = {}
    for name, check in checks.items():
        try:
            values[name] = check(data.get(name))
        except WrongValueError as error:
            error.place = f"{name}.{error.place}".rstrip(".")
            if name not in data:
                error.expected = f"required, {error.expected}"
            raise
    return values


def _record(cls: Any, **checks: Check) -> Check:
    """Return the check of a nested object, which becomes a tuple of the class."""
    return lambda value: cls(**_checked(_mapping(value), checks))


class Wire(NamedTuple):
    """Bytes that crossed the network over the whole run, the collective's own factor included."""

    per_worker: float
    total: float | None


class Modelled(NamedTuple):
    """Communication time of a step that was computed from a link, not measured."""

    seconds: float
    link_gbit: float
    link_latency_us: float


class Failure(NamedTuple):
    """Why a run has no result: it diverged at `step`, counted from 0."""

    step: int
    reason: str


_NONE: Mapping[str, Any] = {}


@dataclass(slots=True)
class Summary:
    """The fields of summary.json that a comparison needs; the others are in `more`."""

    task: str
    compressor: str
    compressor_name: str
    workers: int
    collective: str
    engine: str
    seed: int
    steps: int
    batch: int
    payload_bytes_up: float
    payload_bytes_down: float
    wire_bytes: Wire
    config: Mapping[str, Any]
    """As recorded; rows of a file share it between seeds and leave the seed out."""
    gradients: str | None = None
    test_accuracy: float | None = None
    test_loss: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    failed: Failure | None = None
    test_top5: float | None = None
    test_examples: int | None = None
    train_loss: float | None = None
    params: int | None = None
    nominal_ratio: float | None = None
    payload_ratio_up: float | None = None
    payload_ratio_down: float | None = None
    phase_seconds: Mapping[str, float | None] = field(default_factory=dict)
    communicate_modelled: Modelled | None = None
    step_seconds: float | None = None
    config_hash: str | None = None
    skipped_steps: int = 0
    provenance: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    present: frozenset[str] = frozenset()
    """The keys that the summary has."""

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Summary:
        """Return the summary of a JSON object.

        Raises:
            WrongValueError: a field is missing or has a wrong value; `place` names it.
        """
        keys, checks = _checks_of(frozenset(data))
        rest = keys - _CHECKS.keys()
        more = {name: data[name] for name in rest} if rest else _NONE
        return cls(**_checked(data, checks), more=more, present=keys)

    def model_dump(self) -> dict[str, Any]:
        """Return the summary as JSON values, missing fields with their defaults."""
        values = {name: getattr(self, name) for name in _CHECKS}
        for name in ("wire_bytes", "failed", "communicate_modelled"):
            if values[name] is not None:
                values[name] = values[name]._asdict()
        config = {"seed": self.seed, **self.config}
        return {**values, "config": config, **self.more}


@cache
def _checks_of(keys: frozenset[str]) -> tuple[frozenset[str], dict[str, Check]]:
    """Return the keys, one object for all summaries with them, and the checks of their fields."""
    for name in _REQUIRED:
        if name not in keys:
            raise WrongValueError("required", None, name)
    return keys, {name: check for name, check in _CHECKS.items() if name in keys}


_BY_TYPE: dict[Any, Check] = {
    "str": _text,
    "str | None": _optional(_text),
    "int": _integer(),
    "int | None": _optional(_integer()),
    "float": _bytes,
    "float | None": _number_or_none,
    "Mapping[str, Any]": _mapping,
    "Mapping[str, float | None]": _seconds,
    "Wire": _record(Wire, per_worker=_number, total=_number_or_none),
    "Modelled | None": _optional(
        _record(Modelled, seconds=_number, link_gbit=_number, link_latency_us=_number)
    ),
    "Failure | None": _optional(_record(Failure, step=_integer(), reason=_text)),
}
"""The checks of the fields by their annotations; a plain float is a number of bytes, at least 0."""
_FIELDS = [each for each in fields(Summary) if each.name not in ("more", "present")]
_CHECKS = {
    **{each.name: _BY_TYPE[each.type] for each in _FIELDS},
    **dict.fromkeys(("workers", "steps", "batch"), _integer(1)),
    **dict.fromkeys(("test_accuracy", "validation_accuracy", "test_top5"), _optional(_share)),
    "test_examples": _optional(_integer(1)),
}
_REQUIRED = [each.name for each in _FIELDS if each.default is each.default_factory is MISSING]
