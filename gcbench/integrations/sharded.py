"""What torch knows of an FSDP2 model: its modules, their process groups, what may be compressed.

Torch offers a place for another reduce-scatter, `FSDPModule.set_custom_reduce_scatter`, but not the
parameters behind it. They are read here, and nowhere else, from attributes that may change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gcbench.core.errors import UsageError
from gcbench.integrations import handshake
from gcbench.integrations.layout import Layout, Parameter

TRIED = "2.11, 2.13 and 2.15"
"""Versions of torch whose internals are known here."""
DTYPES = (torch.float32, torch.bfloat16)
"""The types in which FSDP may reduce: the exchange works in float32, which holds both exactly."""


@dataclass(frozen=True)
class Sharded:
    """One module that `fully_shard` was called on, or several that it was called on together."""

    name: str
    module: Any
    """torch.distributed.fsdp.FSDPModule."""
    known: Any
    """torch's own record of the module's parameters, a private FSDPParamGroup."""
    parameters: tuple[Parameter, ...]
    """Those that require a gradient."""
    dtypes: tuple[torch.dtype, ...]
    """In which FSDP would reduce the gradient of each."""
    group: dist.ProcessGroup
    """The ranks of which each holds one shard."""
    device: torch.device
    tensor_parallel: bool
    tensors: tuple[torch.Tensor, ...]
    """The parameters themselves, as optimizers have them: this rank's shards."""

    def layout(self, dense_below: int) -> Layout:
        """Return where the gradients lie. Parameters of fewer elements than that stay in fp32."""
        dense = tuple(parameter.numel < dense_below for parameter in self.parameters)
        return Layout(self.parameters, dense, self.group.size())

    def examine(self, replicas: dist.ProcessGroup | None) -> None:
        """Raise UsageError if the module's gradients cannot be compressed.

        `replicas`: the ranks that hold the same shards, if there are any.
        """
        if hasattr(self.known.mesh_info, "replicate_process_group"):
            raise UsageError(
                f"{self.name} is sharded over a mesh of two dimensions, where FSDP takes the mean "
                'over replicas itself. Call fully_shard(..., mesh=mesh["shard"]) and '
                'register(model, replicas=mesh["replicate"])'
            )
        if self.tensor_parallel:
            raise UsageError(
                f"{self.name} is tensor parallel (its parameters were DTensors before "
                "fully_shard), which was never tried. Shard the model by FSDP alone"
            )
        if len(set(self.dtypes)) > 1 or self.dtypes[0] not in DTYPES:
            found = ", ".join(sorted({str(dtype) for dtype in self.dtypes}))
            raise UsageError(f"{self.name}: gradients would be reduced in {found}. {REDUCE}")
        if not type(self.known._reduce_scatter_comm).__module__.startswith("torch."):
            raise UsageError(
                f"{self.name} has a reduce-scatter of its own already, and FSDP takes one. Call "
                "fully_shard on a new model to register another hook"
            )
        factor = self.known.gradient_divide_factor
        if factor is not None and factor != self.group.size():
            raise UsageError(
                f"{self.name}: set_gradient_divide_factor({factor}) asks for a scaled sum, and "
                "the exchange here takes the mean. Leave it out and scale the loss"
            )
        if replicas is not None and self.known._all_reduce_hook is not None:
            raise UsageError(
                f"{self.name} has an all-reduce hook, and FSDP takes one. Leave it out, or leave "
                "out replicas"
            )
        for group in (self.group, *([] if replicas is None else [replicas])):
            handshake.check_backend("a", group, self.device)


REDUCE = (
    "All in float32 or all in bfloat16 can be compressed, and float16 overflows where sums are "
    "taken: fully_shard(..., mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))"
)


def takes_unused() -> bool:
    """Return whether this torch can be told to send zeros for parameters without a gradient."""
    from torch.distributed.fsdp import FSDPModule

    return hasattr(FSDPModule, "set_reduce_scatter_unused_params")


def modules(model: nn.Module) -> list[Sharded]:
    """Return the modules of a model that have a reduce-scatter of their own.

    Raises:
        UsageError: there is none, torch has no place for a hook, or its internals are others.
    """
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        FSDPModule = None  # type: ignore[assignment, misc]
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise UsageError(
            f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter. Tried here: "
            f"torch {TRIED}"
        )
    prefixes = {id(module): prefix for prefix, module in model.named_modules()}
    found: dict[int, Sharded] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            name = prefix or "the root module"
            try:
                state: Any = module._get_fsdp_state()
                if id(state) not in found and (each := _read(name, module, state, prefixes)):
                    found[id(state)] = each
            except AttributeError as error:
                raise UsageError(
                    f"FSDP2 of torch {torch.__version__} does not hold parameters where they are "
                    f"looked for ({error}). Tried here: torch {TRIED}"
                ) from error
    if not found:
        raise UsageError(
            f"a {type(model).__name__} came, of which no module with parameters that require a "
            "gradient went through torch.distributed.fsdp.fully_shard: call that first. For "
            "DistributedDataParallel there is gcbench.comm_hook; FSDP1 has no place for a hook"
        )
    return [*found.values()]


def _read(name: str, module: Any, state: Any, prefixes: Mapping[int, str]) -> Sharded | None:
    """Return what torch's private state says of one module; None if it has nothing to train.

    Raises:
        AttributeError: the state is not that of a torch that is known here.
        UsageError: its parameters are not in one group of ranks, or in none.
    """
    groups = _groups(state)
    if len(groups) > 1:
        raise UsageError(
            f"{name} has parameters on several meshes, and torch takes a custom reduce-scatter "
            "only of modules with one mesh. Call fully_shard on parts of it, each with one mesh"
        )
    trained = [p for group in groups for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trained:
        return None
    known = groups[0]
    if not hasattr(known.mesh_info, "shard_process_group"):
        raise UsageError(
            f"{name} is replicated and not sharded. Wrap the model in DistributedDataParallel and "
            "take gcbench.comm_hook"
        )
    group = known.mesh_info.shard_process_group
    parameters, dtypes = [], []
    for each in trained:
        prefix = prefixes.get(id(each._module_info.module), "")
        full = ".".join(filter(None, [prefix, each._module_info.param_name]))
        dim = each.fsdp_placement.dim
        parameters.append(Parameter.of(full, each._orig_size, dim, group.size()))
        holder = known if hasattr(known, "mp_policy") else each  # torch 2.15: by parameter
        policy = holder.mp_policy
        dtypes.append(policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype)
    parallel = any(each.is_dtensor for each in trained)
    return Sharded(
        *(name, module, known, tuple(parameters), tuple(dtypes), group, known.device, parallel),
        tensors=tuple(each.sharded_param for each in trained),
    )


def _groups(state: Any) -> list[Any]:
    """Return torch's records of a module's parameters, each in one group of ranks."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return list(filter(None, [state._fsdp_param_group]))  # torch 2.11 has one at most


def gathering(model: nn.Module) -> list[tuple[Any, Any]]:
    """Return the modules whose parameters FSDP gathers by torch's own collective.

    Each with torch's private record of its parameters. Frozen modules are among them.
    """
    from torch.distributed.fsdp import FSDPModule

    pairs = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = _groups(state)
            if len(groups) != 1 or not hasattr(groups[0].mesh_info, "shard_process_group"):
                continue
            if type(groups[0]._all_gather_comm).__name__ == "DefaultAllGather":
                pairs.append((module, groups[0]))
    return pairs


def in_backward(model: nn.Module) -> bool:
    """Return whether a backward pass of a model has begun and has not ended."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            return bool(state._state_ctx.post_backward_final_callback_queued)
    return False


def group_of(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group of a mesh of one dimension, or what is one."""
    if not isinstance(given, DeviceMesh):
        return given
    if given.ndim != 1:
        raise UsageError(
            f'replicas is a mesh of {given.ndim} dimensions, and one is expected: mesh["replicate"]'
        )
    return given.get_group()
