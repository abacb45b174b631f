"""FSDP2's view of a model: its modules, their process groups, and whether they can be compressed.

Torch accepts a custom reduce-scatter (`FSDPModule.set_custom_reduce_scatter`), but does not expose
the parameters behind it. Only this module reads them, from private attributes that may change.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from gcbench.core.errors import UsageError
from gcbench.integrations import handshake
from gcbench.integrations.layout import Layout, Parameter

TRIED = "2.11, 2.13 and 2.15"
"""Versions of torch whose internals this module was tested with."""
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes in which FSDP may reduce: the exchange works in float32, which represents both exactly."""


SPLITS = ("pp", "pipe", "stage", "tp", "tensor", "model", "cp", "context", "sp", "ep", "expert")
"""How names of a mesh's dimensions begin whose ranks have no replicas of a shard."""


@dataclass(frozen=True)
class Sharded:
    """One module that `fully_shard` was called on, or several that it was called on together."""

    name: str
    module: Any
    """torch.distributed.fsdp.FSDPModule."""
    param_group: Any
    """torch's record of the module's parameters, a private FSDPParamGroup."""
    parameters: tuple[Parameter, ...]
    """Those that require a gradient."""
    dtypes: tuple[torch.dtype, ...]
    """The dtype in which FSDP would reduce each gradient."""
    group: dist.ProcessGroup
    """The ranks that hold one shard each."""
    device: torch.device
    records: tuple[Any, ...]
    """torch's records of the parameters, private FSDPParams."""
    frozen: tuple[tuple[str, Any], ...]
    """Name and torch's record of each of the module's other parameters."""

    @property
    def named(self) -> dict[str, Any]:
        """Name -> parameter as optimizers have it: this rank's shard, which a load may replace."""
        pairs = zip(self.parameters, self.records, strict=True)
        return {parameter.name: record.sharded_param for parameter, record in pairs}

    @property
    def unfrozen(self) -> list[str]:
        """Names of `frozen` parameters that require a gradient in this backward pass."""
        return [name for name, record in self.frozen if record._unsharded_param.requires_grad]

    @property
    def newly_frozen(self) -> list[str]:
        """Names of `parameters` that require no gradient in this backward pass."""
        pairs = zip(self.parameters, self.records, strict=True)
        return [p.name for p, record in pairs if not record._unsharded_param.requires_grad]

    @property
    def beside(self) -> list[str]:
        """Names of its mesh's dimensions with other ranks, unless they split the model, too."""
        mesh: Any = self.param_group.mesh_info.mesh
        root = getattr(mesh, "_get_root_mesh", lambda: mesh)()
        shards = set(dist.get_process_group_ranks(self.group))
        return [
            name
            for name in root.mesh_dim_names or ()
            if not name.startswith(SPLITS) and not shards.issuperset(root[name].mesh.tolist())
        ]

    def layout(self, dense_below: int) -> Layout:
        """Return the layout of the gradients; parameters of fewer elements stay in fp32."""
        dense = tuple(parameter.numel < dense_below for parameter in self.parameters)
        return Layout(self.parameters, dense, self.group.size())

    def examine(self, replicas: dist.ProcessGroup | None) -> None:
        """Raise UsageError if the module's gradients cannot be compressed.

        `replicas`: the ranks that hold the same shards, if any.
        """
        if hasattr(self.param_group.mesh_info, "replicate_process_group"):
            raise UsageError(
                f"{self.name} is sharded over a mesh of two dimensions, where FSDP itself averages "
                'over replicas. Call fully_shard(..., mesh=mesh["shard"]) and '
                'register(model, replicas=mesh["replicate"])'
            )
        if any(record.is_dtensor for record in self.records):
            raise UsageError(
                f"{self.name} is tensor parallel (its parameters were DTensors before "
                "fully_shard), which was never tested. Shard the model by FSDP alone"
            )
        if len(set(self.dtypes)) > 1 or self.dtypes[0] not in DTYPES:
            dtypes = ", ".join(sorted({str(dtype) for dtype in self.dtypes}))
            raise UsageError(f"{self.name}: gradients would be reduced in {dtypes}. {REDUCE}")
        if not type(self.param_group._reduce_scatter_comm).__module__.startswith("torch."):
            raise UsageError(
                f"{self.name} already has a custom reduce-scatter, and FSDP allows one. Call "
                "fully_shard on a new model to register another hook"
            )
        factor = self.param_group.gradient_divide_factor
        if factor is not None and factor != self.group.size():
            raise UsageError(
                f"{self.name}: set_gradient_divide_factor({factor}) requests a scaled sum, and the "
                "exchange computes the mean. Leave it out and scale the loss"
            )
        if replicas is not None and self.param_group._all_reduce_hook is not None:
            raise UsageError(
                f"{self.name} has an all-reduce hook, and FSDP allows one. Leave it out, or leave "
                "out replicas"
            )
        for group in (self.group, *([] if replicas is None else [replicas])):
            handshake.check_backend("a", group, self.device)


REDUCE = (
    "Allowed: float32 for all, or bfloat16 for all; sums in float16 overflow. Use "
    "fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
)


def takes_unused() -> bool:
    """Return whether this torch can send zeros for parameters without a gradient."""
    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def _states(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, module and torch's private state of the modules that FSDP shards."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            yield name, module, module._get_fsdp_state()


def modules(model: nn.Module) -> list[Sharded]:
    """Return the modules of a model that have a reduce-scatter of their own.

    Raises:
        UsageError: there are none, torch accepts no hook, or its internals differ.
    """
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UsageError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter. Tested "
            f"versions: {TRIED}"
        )
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    result: dict[int, Sharded] = {}
    try:
        for name, module, state in _states(model):
            name = name or "the root module"
            if id(state) not in result and (each := _read(name, module, state, prefixes)):
                result[id(state)] = each
    except AttributeError as error:
        raise UsageError(
            f"FSDP2 of torch {torch.__version__} has unexpected internals ({error}). "
            f"Tested versions: {TRIED}"
        ) from error
    if not result:
        raise UsageError(
            f"register received a {type(model).__name__} without a sharded module whose "
            "parameters require a gradient: call torch.distributed.fsdp.fully_shard first. For "
            "DistributedDataParallel use gcbench.comm_hook; FSDP1 does not support hooks"
        )
    return [*result.values()]


def _read(name: str, module: Any, state: Any, prefixes: Mapping[int, str]) -> Sharded | None:
    """Return a module as torch's private state describes it; None without trainable parameters."""
    groups = _groups(state)
    if len(groups) > 1:
        raise UsageError(
            f"{name} has parameters on several meshes, and torch accepts a custom reduce-scatter "
            "only for modules with one mesh. Call fully_shard on parts of it, each with one mesh"
        )
    trained = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trained:
        return None
    param_group = groups[0]
    if not hasattr(param_group.mesh_info, "shard_process_group"):
        raise UsageError(
            f"{name} is replicated, not sharded. Wrap the model in DistributedDataParallel and "
            "use gcbench.comm_hook"
        )
    group = param_group.mesh_info.shard_process_group
    others = [p for p in param_group.fsdp_params if not p.sharded_param.requires_grad]
    parameters, dtypes = [], []
    for each in trained:
        full = _full_name(each, prefixes)
        dim = each.fsdp_placement.dim
        parameters.append(Parameter.of(full, each._orig_size, dim, group.size()))
        # In torch 2.15 each parameter has a policy.
        policy = (param_group if hasattr(param_group, "mp_policy") else each).mp_policy
        dtypes.append(policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype)
    return Sharded(
        *(name, module, param_group, tuple(parameters), tuple(dtypes), group),
        *(param_group.device, tuple(trained)),
        tuple((_full_name(each, prefixes), each) for each in others),
    )


def _full_name(parameter: Any, prefixes: Mapping[int, str]) -> str:
    """Return the name in the model of a parameter, given as torch's private record of it.

    `prefixes`: the names of the model's modules by id.
    """
    info = parameter._module_info
    return ".".join(filter(None, [prefixes.get(id(info.module), ""), info.param_name]))


def _groups(state: Any) -> list[Any]:
    """Return torch's records of a module's parameters, one per group of ranks."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return list(filter(None, [state._fsdp_param_group]))  # torch 2.11 has at most one


def gathering(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the modules whose parameters FSDP gathers by torch's default collective.

    Each with torch's private record of its parameters. Frozen modules are included.
    """
    pairs = [(module, _groups(state)) for _, module, state in _states(model)]
    return [
        (module, groups[0])
        for module, groups in pairs
        if len(groups) == 1
        and hasattr(groups[0].mesh_info, "shard_process_group")
        and type(groups[0]._all_gather_comm).__name__ == "DefaultAllGather"
    ]


def frozen(model: nn.Module) -> list[tuple[str, Any]]:
    """Return name and torch's private record of sharded parameters without a gradient."""
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    groups = [group for *_, state in _states(model) for group in _groups(state)]
    records = {id(each): each for group in groups for each in group.fsdp_params}.values()
    return [(_full_name(each, prefixes), each) for each in records if not requires_grad(each)]


def requires_grad(parameter: Any) -> bool:
    """Return whether a parameter requires a gradient, given as torch's private record of it."""
    if parameter.sharded_param.requires_grad:
        return True
    # While it is gathered, as after an evaluation, `model.parameters()` has another tensor.
    gathered: bool = parameter.sharded_state.name == "UNSHARDED"
    return gathered and bool(parameter._unsharded_param.requires_grad)


def in_backward(model: nn.Module) -> bool:
    """Return whether a backward pass of a model has begun and has not ended."""
    first = next(_states(model), None)
    return first is not None and bool(first[2]._state_ctx.post_backward_final_callback_queued)


def group_of(replicas: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a mesh of one dimension; any other value unchanged."""
    if not isinstance(replicas, DeviceMesh):
        return replicas
    if replicas.ndim != 1:
        raise UsageError(
            f'replicas is a mesh of {replicas.ndim} dimensions: expected one, mesh["replicate"]'
        )
    return replicas.get_group()
