"""A third party's file with codec, memory and update rule, as the guide your-method shows it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from commands import PATIENCE, invoke

import gcbench
from gcbench.checks import processes, properties
from gcbench.core import memory, registry
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.training.configuration import Config

pytestmark = pytest.mark.usefixtures("forked")

GUIDE = Path(__file__).parents[2] / "gcbench/docs/your-method.md"


def shown(name: str) -> str:
    """Return the example of the guide that has this class."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    (source,) = [block for block in blocks if f"class {name}(" in block]
    return source


@pytest.fixture
def mine(tmp_path, forget):
    path = tmp_path / "mine.py"
    path.write_text(shown("ThreeParts"))
    return path


def test_verify_holds_it_to_all_three_parts(mine):
    method = gcbench.get_compressor(str(mine))
    for check in ("contraction", "checkpoint", "update rule"):
        assert properties.run(method, check).verdict == "holds", check
    (there,) = processes.in_processes([("mine", {})])
    assert processes.compared(processes.digests(method), there).verdict == "holds"


def test_it_trains_in_every_engine_and_with_local_steps(mine, tmp_path):
    words = ("run", "--task", "digits", "--compressor", mine, "--steps", 60, "--workers", 2)
    words = (*words, "--results", tmp_path / "runs", "--json", "--progress", "none")
    here, there, ddp = invoke(*words, "--lr", 0.003, "--engine", "simulate,spawn,ddp").json
    assert here["params_sha256"] == there["params_sha256"]
    assert min(run["test_accuracy"] for run in (here, ddp)) > 0.6
    for run in (here, there, ddp):
        assert (run["config"]["memory"], run["config"]["optimizer"]) == ("mine", "sgd")
    local = ("--local-steps", 5, "--outer-lr", 0.003, "--lr", 0.1)
    run = invoke(*words, *local).json
    assert run["test_accuracy"] > 0.3


def test_its_fields_are_those_of_all_parts(mine):
    method = gcbench.get_compressor(str(mine), beta=0.5)
    assert method.rule.beta == 0.5
    assert method.memory == "mine"
    assert type(memory.of(method)).__name__ == "Carried"
    assert registry.memory_class("mine") is type(memory.of(method))
    config = Config.make({"compressor": "mine", "options": {"beta": 0.5}})
    assert config.make_memory() == memory.of(method)


def test_its_memory_serves_around_another_method(mine, tmp_path):
    """`--memory ./mine.py`: the residual of the file is the residual of ours."""
    words = ("run", "--task", "digits", "--compressor", "topk", "--steps", 20, "--workers", 2)
    words = (*words, "--results", tmp_path / "runs", "--json", "--progress", "none")
    theirs = invoke(*words, "--memory", mine).json
    ours = invoke(*words, "--memory", "residual").json
    assert theirs["config"]["memory"] == "mine"
    assert theirs["params_sha256"] == ours["params_sha256"]
    assert theirs["provenance"]["plugins"]["memory"]["distribution"] == "file mine.py"
    hook = gcbench.comm_hook("topk", memory=str(mine))
    assert type(hook.settings.memory).__name__ == "Carried"


@pytest.mark.parametrize("name", ["ef21", "residual"])
def test_its_memory_cannot_have_the_name_of_another(name, tmp_path, forget):
    path = tmp_path / f"{name}.py"
    path.write_text(shown("ThreeParts"))
    with pytest.raises(GcbenchError, match=f"memory '{name}' .built-in.*Rename the file"):
        Config.make({"compressor": registry.add_file(str(path))})
    forget()
    path.write_text(shown("ThreeParts").replace("memory: ClassVar[Any] = Carried", ""))
    config = Config.make({"compressor": registry.add_file(str(path)), "memory": name})
    assert type(config.make_memory()).__module__.startswith("gcbench.compressors.memories")


def test_a_memory_cannot_have_the_name_of_a_method_with_another(mine, forget):
    other = mine.with_name("dlion.py")
    other.write_text(shown("ThreeParts"))
    registry.add_file(str(other), "memory")
    with pytest.raises(GcbenchError, match="Rename the file"):
        gcbench.get_compressor("dlion")
    forget()
    registry.add_file(str(mine), "memory")
    method = gcbench.get_compressor(str(mine))
    assert registry.memory_class("mine") is type(memory.of(method))


def test_a_subclass_has_the_memory_of_its_parent(mine, tmp_path, forget, monkeypatch):
    from gcbench.compressors.dlion import DistributedLion

    path = tmp_path / "heir.py"
    path.write_text(
        "from gcbench.compressors.dlion import DistributedLion\n\n\n"
        "class Heir(DistributedLion):\n    pass\n"
    )
    monkeypatch.setattr(DistributedLion, "memory", "DistributedLion")  # as before its first use
    before = Config.make({"compressor": registry.add_file(str(path))})
    registry.compressor("dlion")
    after = Config.make({"compressor": "heir"})
    assert before.memory == after.memory == "dlion"
    assert type(after.make_memory()).__module__ == DistributedLion.__module__
    # An abstract class in the same file.
    base = shown("ThreeParts").replace(
        "    @property\n    def rule",
        "    @abstractmethod\n    def nothing(self): ...\n\n    @property\n    def rule",
    )
    heir = "class Heir(ThreeParts):\n    def nothing(self):\n        pass\n"
    mine.write_text(f"from abc import abstractmethod\n{base}\n\n{heir}")
    config = Config.make({"compressor": registry.add_file(str(mine))})
    assert (config.memory, type(config.make_memory()).__name__) == ("mine", "Carried")


def test_a_memory_cannot_have_the_name_of_the_default(mine, forget):
    """`--memory auto` is the method's memory: a file of that name would never be used."""
    path = mine.rename(mine.with_name("auto.py"))
    with pytest.raises(UsageError, match="rename the file"):
        registry.add_file(str(path), "memory")
    method = gcbench.get_compressor(str(path))
    assert Config.make({"compressor": method.name}).memory == "auto"


def test_a_file_without_a_memory_is_refused_as_one(tmp_path, forget):
    (tmp_path / "halves.py").write_text(shown("Halves"))
    name = registry.add_file(str(tmp_path / "halves.py"), "memory")
    with pytest.raises(GcbenchError, match="no Memory class"):
        registry.memory_class(name)
    with pytest.raises(UsageError, match=r"nowhere\.py: no such file"):
        registry.add_file("./nowhere.py", "memory")


JOB = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gcbench


def train(method, start_step):
    # Returns the sum of the parameters after 6 steps, in which they stay equal on all ranks.
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    model = DistributedDataParallel(net)
    hook = gcbench.comm_hook(method, start_step=start_step).register(model)
    optimizer = hook.optimizer(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        seed = 10 * step + dist.get_rank()
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
        model(x).square().mean().backward()
        before = net.weight.detach().clone()
        optimizer.step()
        moved = before - net.weight.detach()
        expected = 0.01 / (1 + step) * (net.weight.grad + 0.1 * before)
        torch.testing.assert_close(moved, expected)
        if method != "onebitadam":
            assert {float(d) for d in net.weight.grad.unique()} <= {-1.0, 0.0, 1.0}
    flat = torch.cat([p.detach().view(-1) for p in net.parameters()])
    both = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(both, flat)
    assert all(torch.equal(each, flat) for each in both)
    tensors = hook.state_dict()["exchange"].get("tensors", {})
    assert any(name.startswith("joint ") for name in tensors) or method == "dlion"
    hook.close()
    return float(flat.sum())


dist.init_process_group("gloo")
sums = [train(method, int(start)) for method, _, start in (a.partition("@") for a in sys.argv[1:])]
print(f"{sums}\\n", end="", flush=True)  # in one write: ranks share the pipe
"""


@pytest.mark.parametrize(
    ("methods", "ranks"), [(("mine@0", "onebitadam@3", "dlion@0"), 2), (("onebitadam@3",), 1)]
)
def test_update_rules_run_in_a_ddp_job(mine, programs, tmp_path, methods, ranks):
    """Replicas stay equal, and the optimizer of the hook applies the direction that it delivers."""
    (tmp_path / "job.py").write_text(JOB)
    specs = [one.replace("mine@", f"{mine}@") for one in methods]
    command = ["torchrun", "--standalone", "--nproc-per-node", str(ranks), "job.py", *specs]
    done = programs.shell(shlex.join(command), tmp_path, PATIENCE)
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.splitlines())) == 1
    assert len(json.loads(done.stdout.splitlines()[0])) == len(methods)


def test_hooks_say_which_optimizer_they_want(mine):
    with pytest.raises(UsageError, match="TopK"):
        gcbench.comm_hook("topk").optimizer([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    with pytest.raises(UsageError, match="check_every=10"):
        gcbench.comm_hook("dlion", check_every=10)
    with pytest.raises(UsageError, match="DistributedLion"):
        gcbench.shard_hook("dlion")
    with pytest.raises(UsageError, match="OneBitAdam"):
        gcbench.shard_hook("int8", between="onebitadam")
    with pytest.raises(UsageError, match="optimizer 'adam'"):
        Config.make({"compressor": registry.add_file(str(mine)), "optimizer": "adam"})


# ---- what verify must refuse ---------------------------------------------------------------------

BROKEN = {
    "checkpoint": (
        '    def offer(self, gradient, ctx):\n        return gradient + ctx.state["error"]\n',
        "    kept: ClassVar[dict] = {}\n\n    def offer(self, gradient, ctx):\n"
        "        own = id(ctx.state), len(gradient)\n"
        "        carried = self.kept.setdefault(own, torch.zeros_like(gradient))\n"
        "        return gradient + carried\n",
    ),
    "update rule": ("lerp_(mean, 1 - self.beta)", "lerp_(mean, 0.2)"),
}


def test_faults_in_memory_and_update_rule_are_found(tmp_path, forget):
    """A memory that hides its buffer from the checkpoint, and a rule with another constant."""
    source = shown("ThreeParts")
    hides = source.replace(*BROKEN["checkpoint"]).replace(
        '        torch.sub(offered, sent, out=ctx.state["error"])\n',
        "        torch.sub(offered, sent, out=self.kept[id(ctx.state), len(sent)])\n",
    )
    wrong = source.replace(*BROKEN["update rule"])
    for name, text, check in (("hides", hides, "checkpoint"), ("wrong", wrong, "update rule")):
        assert text != source
        (tmp_path / f"{name}.py").write_text(text)
        method = gcbench.get_compressor(str(tmp_path / f"{name}.py"))
        verdicts = {each: properties.run(method, each).verdict for each in BROKEN}
        assert verdicts[check] == "fails", (name, verdicts)


# ---- claims in another form ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "declared",
    [{"unbiased": True}, gcbench.Claims(None), lambda self: gcbench.Claims(self), "unbiased", None],
    ids=["dict", "instance", "function", "string", "none"],
)
def test_claims_of_another_form_are_refused_with_the_right_one(declared):
    with pytest.raises(GcbenchError, match=r"class claims\(gcbench\.Claims\)"):
        type("Theirs", (gcbench.Compressor,), {"claims": declared})


def test_the_forms_of_claims_that_are_right():
    class Right(gcbench.Claims):
        unbiased = True

    created = [
        type("A", (registry.compressor_class("none"),), {"claims": Right}),
        type("B", (registry.compressor_class("none"),), {"claims": property(Right)}),
    ]
    below = type("C", (registry.compressor_class("none"),), {})
    type("CClaims", (gcbench.Claims,), {"unbiased": True}, of=below)
    for cls in (*created, below):
        claims = cls().claims
        assert claims.unbiased
        assert not claims.contractive
        assert isinstance(claims.codec, cls)
    with pytest.raises(UsageError, match=r"'unbiassed'.*Did you mean 'unbiased'"):
        type("Wrong", (gcbench.Claims,), {"unbiassed": True})
