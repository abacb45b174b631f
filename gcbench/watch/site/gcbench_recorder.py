"""Records the collectives of one rank of a watched job; see `gcbench.watch`.

All collectives of torch.distributed pass through the operators `c10d::*` of torch's dispatcher,
also those of DDP's C++ code, of FSDP and of hooks. The recorder registers a kernel for their
BackendSelect key that notes the call and then calls the original. Functional collectives, compiled
code and `torch.inference_mode` skip the Autograd keys, but not this one. The recorder imports
nothing of gcbench, because the job may have another environment.
"""

import atexit
import contextlib
import functools
import gc
import itertools
import json
import os
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

STARTED: list["Recorder"] = []


def attach(module: Any) -> None:
    """Start recording when the process calls `init_process_group` of this module."""
    initialize, destroy = module.init_process_group, module.destroy_process_group

    @functools.wraps(initialize)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        if not STARTED:
            STARTED.append(Recorder(os.environ["GCBENCH_WATCH"]))
        return initialize(*args, **kwargs)

    @functools.wraps(destroy)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        STARTED[0].finish()  # some programs leave without running exit handlers
        return destroy(*args, **kwargs)

    module.init_process_group = init_process_group
    module.destroy_process_group = destroy_process_group


def _flat(lists: Iterable[Iterable[Any]]) -> list[Any]:
    return [each for inner in lists for each in inner]


Rows = dict[tuple[str, str, int], list[float]]
"""(collective, dtype, ranks) -> calls, bytes handed over and sent, seconds, calls timed."""
Tensors = Callable[[Sequence[Any]], Sequence[Any]]
NOTHING: Tensors = lambda _: ()  # noqa: E731
CALLS: dict[str, tuple[str, Tensors, Tensors]] = {
    "allreduce_": ("all_reduce", lambda a: a[0], lambda a: a[0]),
    "allreduce_coalesced_": ("all_reduce", lambda a: a[0], lambda a: a[0]),
    "broadcast_": ("broadcast", lambda a: a[0], lambda a: a[0]),
    "allgather_": ("all_gather", lambda a: a[1], lambda a: _flat(a[0])),
    "allgather_coalesced_": ("all_gather", lambda a: a[1], lambda a: _flat(a[0])),
    "_allgather_base_": ("all_gather", lambda a: [a[1]], lambda a: [a[0]]),
    "allgather_into_tensor_coalesced_": ("all_gather", lambda a: a[1], lambda a: a[0]),
    "reduce_scatter_": ("reduce_scatter", lambda a: _flat(a[1]), NOTHING),
    "_reduce_scatter_base_": ("reduce_scatter", lambda a: [a[1]], NOTHING),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda a: a[1], NOTHING),
    "alltoall_base_": ("all_to_all", lambda a: [a[1]], NOTHING),
    "alltoall_": ("all_to_all", lambda a: a[1], NOTHING),
    "reduce_": ("reduce", lambda a: a[0], NOTHING),
    "gather_": ("gather", lambda a: a[1], NOTHING),
    "scatter_": ("scatter", lambda a: _flat(a[1]), NOTHING),
    "send": ("send", lambda a: a[0], NOTHING),
}
"""Operator -> its name, what a rank hands to it, and results that must be equal on all ranks."""


SPARSE = "sparse all_reduce"
END = " at the end"
"""Suffix of the names of digests of parameters when the process leaves."""
UNCOUNTED = "bytes of "
"""Prefix of failures by which the numbers of bytes are too low."""
MOST_OPTIMIZERS = 20
"""The parameters of later ones are not compared: a job may create one per step."""


def wire(name: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that a rank sends to others, as `gcbench.core.world` counts them."""
    share = (ranks - 1) / ranks
    factors = {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "reduce": share, "gather": share}
    factors |= {SPARSE: ranks - 1.0}  # gloo gathers indices and values
    factors |= {"reduce_scatter": share, "all_to_all": share, "broadcast": share, "scatter": share}
    return factors.get(name, 1.0) * nbytes


def _strided(tensors: Iterable[Any]) -> list[Any]:
    """Return tensors with the indices and values of sparse ones in their place."""
    parts = []
    for tensor in tensors:
        if tensor.is_sparse:
            each = tensor.detach().coalesce()
            parts += [each.indices(), each.values()]
        else:
            parts.append(tensor)
    return parts


def digest(tensors: Iterable[Any]) -> int:
    """Return a CRC-32 of the bytes of tensors."""
    import torch

    value = 0
    for tensor in _strided(tensors):
        flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        value = zlib.crc32(flat.cpu().numpy().data, value)
    return value


def sharded(parameter: Any) -> bool:
    """Return whether a parameter is a shard, which differs between ranks: a DTensor, or of FSDP."""
    names = ("_local_tensor", "_fsdp_flattened", "_sharding_spec")
    flat = type(parameter).__name__ == "FlatParameter"
    return flat or any(hasattr(parameter, name) for name in names)


class _Call:
    """What a rank hands to a collective: its name, the dtype and the bytes."""

    def __init__(self, name: str, tensors: Sequence[Any]) -> None:
        first = tensors[0] if tensors else None
        self.name = SPARSE if first is not None and first.is_sparse else name
        self.dtype = "-" if first is None else str(first.dtype).removeprefix("torch.")
        self.is_cuda = first is not None and first.is_cuda
        self.is_meta = first is not None and first.is_meta  # of a trace, which sends nothing
        self.nbytes = sum(each.numel() * each.element_size() for each in _strided(tensors))


class Totals:
    """Calls, bytes and seconds of the collectives so far, and snapshots of them.

    The seconds of a call may be known after its step has ended, because the thread that reports
    them waits for the interpreter. They are added to the snapshots that count the call.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rows: Rows = {}
        self.snapshots: list[tuple[int, Rows]] = []
        """The first and the last, each with the number of calls before it."""
        self.calls = 0

    def called(self, key: tuple[str, str, int], nbytes: float) -> Callable[[float], None]:
        """Count a call, and return a function that adds its seconds."""
        name, _, ranks = key
        with self.lock:
            number = self.calls
            self.calls += 1
            row = self.rows.setdefault(key, [0.0] * 5)
            row[0] += 1
            row[1] += nbytes
            row[2] += wire(name, nbytes, ranks)

        def took(seconds: float) -> None:
            with self.lock:
                counting = [rows for before, rows in self.snapshots if number < before]
                for rows in (self.rows, *counting):
                    rows[key][3] += seconds
                    rows[key][4] += 1

        return took

    def snapshot(self) -> Rows:
        """Return the totals of the calls until now; only the first and the last are completed."""
        with self.lock:
            rows = _copy(self.rows)
            self.snapshots = [*self.snapshots[:1], (self.calls, rows)]
        return rows

    def now(self) -> Rows:
        """Return a copy of the totals."""
        with self.lock:
            return _copy(self.rows)


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class _Followed:
    """An optimizer of the job: its number in the order of first use, and its steps so far."""

    def __init__(self, optimizer: Any, number: int) -> None:
        self.reference = weakref.ref(optimizer)
        self.number, self.steps = number, 0
        self.label = "parameters" if number == 1 else f"parameters of optimizer {number}"


class Recorder:
    """Totals per collective, digests of results and parameters, and snapshots per step."""

    def __init__(self, folder: str) -> None:
        import torch
        from torch.optim import optimizer as optimizers

        self.torch, self.folder = torch, folder
        self.every = int(os.environ["GCBENCH_WATCH_EVERY"])
        self.totals = Totals()
        self.groups: dict[str, int] = {}
        """Process groups of all ranks by name: their order of first use."""
        self.unnamed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Those that torch does not register, such as those of gcbench's hooks."""
        self.numbers = itertools.count()
        self.counts: dict[str, int] = {}
        self.digests: dict[str, dict[int, int]] = {}
        self.failures: dict[str, str] = {}
        """What could not be recorded -> the first error. The job goes on."""
        self.steps = 0
        """Of the first optimizer that exists."""
        self.first: Any = None
        self.last: Any = None
        self.optimizers: list[_Followed] = []
        self.stepping: Any = None
        """A weak reference to the optimizer whose step has begun, or None."""
        self.ends: dict[str, dict[int, int]] = {}
        self.finished = False
        self.references: list[weakref.ref[Any]] = []
        with self._harmless(UNCOUNTED + "all collectives"):
            library: Any = torch.library.Library
            self._library = library("c10d", "IMPL")
            for operator in CALLS:
                if hasattr(torch.ops.c10d, operator):
                    kernel = self._kernel(operator)
                    self._library.impl(operator, kernel, "BackendSelect", with_keyset=True)
        self.around_step = optimizers.Optimizer.profile_hook_step(lambda optimizer: None).__code__
        """The code around every optimizer's step that calls the hooks."""
        optimizers.register_optimizer_step_pre_hook(self._begins)
        optimizers.register_optimizer_step_post_hook(self._stepped)
        atexit.register(self.finish)

    def _kernel(self, operator: str) -> Callable[..., Any]:
        torch = self.torch
        original = getattr(torch.ops.c10d, operator).default
        lower = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: Any, *args: Any) -> Any:
            name, sent, _ = CALLS[operator]
            call: Any = None
            with self._harmless(UNCOUNTED + name):  # before a sparse tensor may be replaced
                call = _Call(name, list(sent(args)))
            began = time.perf_counter()
            result = original.redispatch(keys & lower, *args)
            if call is not None and not call.is_meta:
                with self._harmless(UNCOUNTED + name):
                    self._note(call, operator, args, result, began)
            return result

        return kernel

    @contextlib.contextmanager
    def _harmless(self, what: str) -> Iterator[None]:
        """Record an error of the recorder instead of raising it in the job."""
        try:
            yield
        except Exception as error:
            self.failures.setdefault(what, f"{type(error).__name__}: {error}"[:200])

    def _note(
        self, call: "_Call", operator: str, args: Sequence[Any], result: Any, began: float
    ) -> None:
        """Count a call and, if it is to be compared, digest its result."""
        dist, name = self.torch.distributed, call.name
        group = dist.ProcessGroup.unbox(next(a for a in args if type(a).__name__ == "ScriptObject"))
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        ranks = group.size()
        took = self.totals.called((name, call.dtype, ranks), call.nbytes)

        def ended(*_: Any) -> None:
            took(time.perf_counter() - began)

        if call.is_cuda and self.torch.cuda.is_current_stream_capturing():
            raise RuntimeError("in a CUDA graph, whose replays are not counted")
        if call.is_cuda:
            work.wait()  # the future of an NCCL call is done before the call is
            self.torch.cuda.current_stream().synchronize()
            ended()
        else:
            with contextlib.suppress(RuntimeError):  # gloo has no future of a message to one rank
                work.get_future().add_done_callback(ended)
        results = CALLS[operator][2](args)
        if results and ranks == dist.get_world_size():
            label = self._label(group)
            count = self.counts[label] = self.counts.get(label, -1) + 1
            if count % self.every == 0:
                with self._harmless(name):
                    work.wait()  # before the caller changes the result
                    self.digests.setdefault(f"{name} {label}", {})[count] = digest(results)

    def _label(self, group: Any) -> str:
        """Return a name of a group of all ranks that is the same on every rank."""
        name = ""
        with contextlib.suppress(RuntimeError):
            name = str(group.group_name)
        groups, key = (self.groups, name) if name else (self.unnamed, group)
        if key not in groups:
            groups[key] = next(self.numbers)
        return f"in group {groups[key]}"

    def _follow(self, optimizer: Any) -> "_Followed | None":
        return next((each for each in self.optimizers if each.reference() is optimizer), None)

    def _begins(self, optimizer: Any, *_: Any) -> None:
        """Follow an optimizer, unless it is the part of another one for this rank."""
        with self._harmless("optimizer steps"):
            if self._follow(optimizer) is None:
                outer = self.stepping and self.stepping()
                mine = {id(each) for each in _parameters(optimizer)}
                if outer is not None and mine <= {id(each) for each in _parameters(outer)}:
                    return
                self.optimizers.append(_Followed(optimizer, len(self.optimizers) + 1))
            self.stepping = weakref.ref(optimizer)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """Note the end of a step. Those of the first optimizer that exists count for the job."""
        with self._harmless("optimizer steps"):
            followed = self._follow(optimizer)
            if followed is None or self._is_part(optimizer):
                return
            self.stepping, self.ends, self.finished = None, {}, False
            followed.steps += 1
            if next(each for each in self.optimizers if each.reference() is not None) is followed:
                self.steps += 1
                totals = self.totals.snapshot()
                self.last = {"time": time.perf_counter(), "totals": totals, "hooks": self._hooks()}
                self.first = self.first or self.last
            if followed.steps % self.every == 0 or followed.steps == 1:
                self._check_parameters(followed, followed.label, self.digests)
                self.write()

    def _is_part(self, optimizer: Any) -> bool:
        """Return whether a step is `super().step()` of another one; torch calls hooks for both."""
        frame, count = sys._getframe(1), 0
        while frame is not None:
            count += frame.f_code is self.around_step and frame.f_locals["self"] is optimizer
            frame = frame.f_back  # type: ignore[assignment]
        return count > 1

    def _check_parameters(
        self, followed: "_Followed", name: str, digests: dict[str, dict[int, int]]
    ) -> None:
        if followed.number > MOST_OPTIMIZERS:
            why = f"parameters of the first {MOST_OPTIMIZERS} optimizers are compared"
            self.failures["parameters of later optimizers"] = why
            return
        with self._harmless(name):
            parameters = _parameters(followed.reference())
            in_round = any(getattr(hook, "_open", 0) for hook in self._alive())  # of local steps
            if not in_round and not any(map(sharded, parameters)):
                digests.setdefault(name, {})[followed.steps] = digest(parameters)

    def _alive(self) -> list[Any]:
        """Return the hooks that `_hooks` found and that still exist."""
        return [hook for reference in self.references if (hook := reference()) is not None]

    def _hooks(self) -> list[dict[str, Any]]:
        """Return gcbench's hooks in this process, and the bytes that each has sent to others."""
        module = sys.modules.get("gcbench.integrations.hook")
        if module is None:
            return []
        if self.steps == 1 or self.steps % self.every == 0:
            hooks = [each for each in gc.get_objects() if issubclass(type(each), module.Hook)]
            self.references = [weakref.ref(each) for each in hooks]
        return [
            {
                "id": id(hook),
                "hook": f"{hook.CALL}({hook.settings.compressor!r})",
                "wire": hook.traffic.wire + (hook.checked.wire if hasattr(hook, "checked") else 0),
            }
            for hook in self._alive()
        ]

    def finish(self) -> None:
        """Write the record with the parameters as they are when the process leaves."""
        with self._harmless("record"):
            if not self.torch.distributed.is_initialized():
                return
            live = [each for each in self.optimizers if each.reference() is not None]
            if self.optimizers and not live:
                self.failures["parameters" + END] = "no optimizer of the job was left"
            self.ends, self.finished = {}, True
            for each in live:
                self._check_parameters(each, each.label + END, self.ends)
            self.write()

    def write(self) -> None:
        """Write the record of this rank."""
        dist = self.torch.distributed
        if not dist.is_initialized():
            return
        now = self.totals.now()
        snapshots = {"start": self.first, "end": self.last, "whole": {"time": 0, "totals": now}}
        rank = dist.get_rank()
        record = {
            "rank": rank,
            "world_size": dist.get_world_size(),
            "here": _here(rank),
            "steps": self.steps,
            "optimizers": [each.steps for each in self.optimizers],
            "finished": self.finished,
            "digests": {**self.digests, **self.ends},
            "failures": self.failures,
            **{name: _plain(snapshot) for name, snapshot in snapshots.items() if snapshot},
        }
        path = os.path.join(self.folder, f"rank-{rank}.json")
        with open(f"{path}.tmp", "w") as file:
            json.dump(record, file)
        os.replace(f"{path}.tmp", path)


def _here(rank: int) -> list[int] | None:
    """Return the first rank of this machine and its number of ranks; None if no launcher says."""
    local, count = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    return [rank - int(local), int(count)] if local and count else None


def _copy(rows: Rows) -> Rows:
    return {key: list(row) for key, row in rows.items()}


def _plain(snapshot: dict[str, Any]) -> dict[str, Any]:
    return {**snapshot, "totals": [[*key, *row] for key, row in snapshot["totals"].items()]}
