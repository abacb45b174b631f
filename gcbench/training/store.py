"""Checkpoints of a run, beside its other files.

`checkpoint.pt` is replaced atomically, and its predecessor remains. A checkpoint contains a digest
of its bytes, of the provenance, and the number and a digest of the records up to its step. If one
of them does not match, the predecessor is used; if that does not match either, the run is not
resumed.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.core.writing import explained, open_own, write_atomically
from gcbench.results.run_folder import CHECKPOINTS, RunFolder, to_lines

MARK = b"gcbench checkpoint 2 sha256 "
"""The first bytes of a checkpoint; the digest, a line feed and torch.save's output follow."""


class _NotWholeError(Exception):
    """A checkpoint is damaged, or its records are."""


class Run(RunFolder):
    """The folder of one run, with its checkpoints."""

    def _records_digest(self, step: int) -> list[Any]:
        """Return how many records there are up to a step, and their SHA-256."""
        records = [record for record in self.records() if record["step"] <= step]
        return [len(records), hashlib.sha256(to_lines(records)).hexdigest()]

    def _provenance_digest(self) -> str:
        """Return the SHA-256 of provenance.json, "" if there is none."""
        path = self.folder / "provenance.json"
        return files.hash_file(path) if path.exists() else ""

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint: a dict of tensors, numbers and strings, with the step in "step".

        Its predecessor remains. The records up to its step reach the disk before it does.
        """
        metrics = self.folder / "metrics.jsonl"
        if metrics.exists():
            with explained(metrics), open_own(metrics, "a") as file:
                os.fsync(file.fileno())
        buffer = io.BytesIO()
        digests = {
            "metrics": self._records_digest(state.get("step", 0)),
            "provenance": self._provenance_digest(),
        }
        torch.save({**state, **digests}, buffer)
        data = buffer.getvalue()
        head = MARK + hashlib.sha256(data).hexdigest().encode() + b"\n"
        last, before = (self.folder / name for name in CHECKPOINTS)
        write_atomically(last, head + data, backup=before)

    def checkpoint(self, tell: Callable[[str], object] = print) -> dict[str, Any] | None:
        """Return the last undamaged checkpoint, on the CPU; None if there is no checkpoint.

        If it is the predecessor, `tell` is called with a message.

        Raises:
            GcbenchError: no checkpoint can be read, or records are missing.
        """
        faults = []
        for name in CHECKPOINTS:
            path = self.folder / name
            if not path.exists():
                continue
            try:
                state = self._checkpoint(path)
            except _NotWholeError as fault:
                faults.append(str(fault))
                continue
            if faults:
                tell(f"{faults[0]}; resuming from the checkpoint before it, step {state['step']}")
            return state
        if faults:
            raise GcbenchError(f"{faults[0]}; start over with --force")
        return None

    def _checkpoint(self, path: Path) -> dict[str, Any]:
        """Return one checkpoint; _NotWholeError if it is damaged."""
        try:
            with open_own(path, "rb") as file:
                head, data = file.read(len(MARK) + 65), file.read()
            if head != MARK + hashlib.sha256(data).hexdigest().encode() + b"\n":
                raise ValueError("its digest does not match")  # noqa: TRY301 - one message for all
            state: dict[str, Any] = torch.load(
                io.BytesIO(data), map_location="cpu", weights_only=True
            )
        except GcbenchError:
            raise
        except Exception as error:
            raise _NotWholeError(f"{path} cannot be read ({error})") from error
        metrics = state.pop("metrics", None)
        if metrics != self._records_digest(state.get("step", 0)):
            raise _NotWholeError(
                f"{self.folder / 'metrics.jsonl'} lost or changed records up to step "
                f"{state.get('step')} of {path.name}"
            )
        if state.pop("provenance", None) != self._provenance_digest():
            raise _NotWholeError(
                f"{self.folder / 'provenance.json'} was changed after {path.name} was written"
            )
        return state
