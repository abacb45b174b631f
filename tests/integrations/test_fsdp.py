"""Compressors in a user's FSDP2 job: equal to the first half of gcbench's own two-shot exchange.

Jobs of real processes are in fsdp_jobs.py; they are started once for each number of processes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import ClassVar

import fsdp_jobs
import jobs
import pytest
import torch
from gcbench.compressors.memories.dgc import Dgc
from gcbench.compressors.memories.none import NoMemory

import gcbench
from gcbench.core import registry
from gcbench.core.compressor import MultiRoundCompressor, Segments, layout_bytes
from gcbench.core.errors import UsageError
from gcbench.integrations import chosen, fsdp, sharded
from gcbench.integrations.layout import Layout, Parameter

ROOT = Path(__file__).parents[2]
COLLECTIVES = {n: gcbench.get_compressor(n).legal_collectives() for n in registry.compressors()}
RULES = [n for n in COLLECTIVES if not gcbench.get_compressor(n).rule.plain]
METHODS = [n for n, legal in COLLECTIVES.items() if "twoshot" in legal and n not in RULES]
GRID = [
    *("hybrid", "silent_replicas"),
    *(name for name in fsdp_jobs.JOBS if name.startswith("two_levels")),
]
"""Jobs of two replicas of two shards."""
JOBS = jobs.Jobs(
    "fsdp_jobs",
    METHODS,
    {2: [name for name in fsdp_jobs.JOBS if name not in GRID], 4: ["plain", *GRID]},
)
of = JOBS.of


# ---- equal to the exchange -----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_as_by_our_own_exchange(name):
    """Bit for bit; with four ranks some chunks are short, and some empty."""
    every = JOBS.method(name)
    assert len({found["end"] for found in every}) == 1
    for found in every:
        assert found["equal"], f"{found['far']} apart"
        assert found["modules"] == 3
        assert found["up"] < 0.55 or name == "none"
        assert found["resumed"], "a job that went on from a saved state"


def test_what_is_not_equal_is_seen():
    for found in of("broken"):
        assert not found["seed"]
        assert not found["place"]


@pytest.mark.parametrize("size", [2, 4])
def test_no_compression_gives_the_numbers_of_fsdp(size):
    """With two ranks the same bits; with four a sum in another order, in bfloat16 a rounded one."""
    for found in of("plain", size):
        for kind in ("float32", "sum", "grouped"):
            assert found[kind] <= (0 if size == 2 else 1e-7)
        assert found["bfloat16"] <= (0 if size == 2 else 1e-3)
        assert found["moved"] > 0.1
        assert found["bytes"], "padding is not sent"


def test_replicas_of_shards_end_as_by_torchs_own_hybrid_sharding():
    for found in of("hybrid", 4):
        assert found["native"] == 0
        assert found["shards of one rank"] < 1e-7
        assert found["bytes"]
        for name in ("none", "qsgd", "onebit"):
            assert found[name], "its own exchange, with other random numbers in each replica"
        assert 'fully_shard(..., mesh=mesh["shard"])' in found["two dimensions"]["text"]
        assert "a mesh of 2 dimensions" in found["replicas of two dimensions"]["text"]
        assert re.search(r"seed: rank \d 0, rank \d 1", found["odd"]["text"])
        assert found["odd"]["seconds"] < 5


def test_fp32_between_replicas_is_the_mean_that_is_taken_without_it():
    for found in of("two_levels", 4):
        assert found["none"], "bit for bit"
        assert found["none bytes"] == found["own bytes"], "padding is not sent"


@pytest.mark.parametrize("name", fsdp_jobs.kinds())
def test_two_levels_end_as_by_our_own_exchanges_one_after_the_other(name):
    """One method of each kind between replicas; the job of another method is the same."""
    every = [found["methods"][name] for found in of("two_levels", 4)]
    assert len({found["end"] for found in every}) == 1, "replicas are the same"
    for found in every:
        assert found["equal"]
        assert found["differs"]
        assert found["resumed"], "a job that went on from a saved state"


def test_methods_between_replicas_are_of_all_kinds():
    methods = [gcbench.get_compressor(name) for name in fsdp_jobs.kinds()]
    assert {method.legal_collectives()[0] for method in methods} == {
        "allreduce",
        "allgather",
        "twoshot",
    }
    assert {method.memory for method in methods} == {"none", "residual"}
    assert any(isinstance(method, MultiRoundCompressor) for method in methods)


def test_what_the_hook_takes_for_replicas_ends_as_by_our_own_exchanges():
    every = of("two_levels_options", 4)
    for found in every:
        assert {name for name, equal in found["equal"].items() if not equal} == set()
        assert len(found["equal"]) == 9
        assert found["ends"] == every[0]["ends"], "replicas are the same"
        assert found["plain of one"]
    assert len({*every[0]["ends"].values()}) == 7, "each option matters"


def declared(method: str, shapes: list[tuple[int, ...]]) -> int:
    """Return the bytes of a payload of tensors of these shapes."""
    codec = gcbench.get_compressor(method)
    layout = codec.layout(Segments.of(shapes, codec.granularity))
    assert layout is not None
    return layout_bytes(layout)


def test_two_levels_send_eight_bits_inside_and_four_between():
    """As layouts declare for the chunks of each module's large parameters, and fp32 of others."""
    for found in of("two_levels_options", 4):
        inside = between = elements = own_elements = small = own_small = 0
        for chunks in found["chunks"].values():  # of a module: of each parameter, of each rank
            large = [each for each in chunks if sum(map(math.prod, each)) >= 50]
            others = [each for each in chunks if each not in large]
            for rank in (0, 1):
                inside += declared("int8", [each[rank] for each in large])
                elements += sum(math.prod(each[rank]) for each in large)
                small += sum(math.prod(each[rank]) for each in others)
            between += declared("hadamard4", [each[found["shard"]] for each in large])
            own_elements += sum(math.prod(each[found["shard"]]) for each in large)
            own_small += sum(math.prod(each[found["shard"]]) for each in others)
        up, up_between = found["up"]
        assert up_between == fsdp_jobs.STEPS * (between + 4 * own_small)
        assert up - up_between == fsdp_jobs.STEPS * (inside + 4 * small)
        assert 8 < 8 * inside / elements < 8.3
        assert 4 < 8 * between / own_elements < 4.6
        assert {"statistic", "encode", "communicate", "decode"} <= {*found["phases"]}


def test_two_levels_that_are_broken_are_seen():
    every = of("two_levels_broken", 4)
    assert len({found["right"] for found in every}) == 1
    for found in every:  # replicas that drew other positions have other means
        assert found["seeds"]["kind"] == "UsageError"
        assert "mean: rank" in found["seeds"]["text"]
    assert not any(found["shared draws"] for found in every)


TWO_LEVELS_REFUSED = {
    "no replicas": "between=QSGD.* and no replicas came.*leave between out",
    "wrong replicas": r"shard of each module, which .*: rank \d .0, 0, 0., rank",
    "method": r"between compressor: rank \d .*Hadamard4.*rank \d .*QSGD",
    "absent": r"between compressor: rank \d .*Hadamard4.*rank \d None",
    "field": r"between compressor: rank \d .*levels=3.*rank \d .*levels=4",
    "memory": r"between memory: rank \d .*Residual.*rank \d .*NoMemory",
    "state without": r"between compressor: '.*Hadamard4.*' then, None now",
    "state of another": r"between compressor: .*Hadamard4.* then, .*Int8.* now",
}


@pytest.mark.parametrize("name", TWO_LEVELS_REFUSED)
def test_two_levels_that_cannot_be_are_refused_on_every_rank(name):
    for found in of("two_levels_refused", 4):
        assert found[name]["kind"] == "UsageError"
        assert re.search(TWO_LEVELS_REFUSED[name], found[name]["text"])
        assert found[name]["seconds"] < 5


def test_a_gradient_that_is_not_finite_is_found_where_a_module_has_one_shard():
    for found in of("two_levels_refused", 4):
        assert found["nan"]["kind"] == "DivergedError"
        assert "rank 0: the gradient of branch.weight is not" in found["nan"]["text"]


OPTIONS = ("start", "seed", "field", "model", "memory", "decay", "resumed at the start")


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_hook_takes_ends_as_by_our_own_exchange(name):
    for found in of("options"):
        assert found[name]


def test_residuals_follow_the_learning_rate_that_the_hook_is_told():
    for found in of("learning_rate"):
        assert found["equal"]
        assert found["resumed"], "with the rate of its state"
        assert found["matters"]


def test_steps_of_one_shard_are_counted_though_nothing_is_exchanged():
    """The user's own all-reduce hook is called as before. An earlier version counted no steps."""
    for found in of("one_shard"):
        assert found["equal"]
        assert found["bytes"] == [0, 0]
        assert found["steps"] == [fsdp_jobs.STEPS, fsdp_jobs.STEPS]
        assert found["theirs"] == fsdp_jobs.STEPS


def test_gradients_that_are_accumulated_are_exchanged_once():
    for found in of("accumulation"):
        assert found["equal"]
        assert found["steps"] == fsdp_jobs.STEPS


def test_a_parameter_without_a_gradient_is_named_as_the_cause_or_sent_as_zeros():
    for found in of("unused"):
        assert found["refused"]["kind"] == "UsageError"
        said = "the root module: 240 elements came and 486 .*Does the loss not use some"
        assert re.search(said, found["refused"]["text"])
        tells = "set_reduce_scatter_unused_params" in found["refused"]["text"]
        assert tells == sharded.takes_unused()
    if not sharded.takes_unused():
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    for found in of("unused"):
        assert found["equal"]


def test_a_weight_may_be_cut_along_another_axis():
    for found in of("placement"):
        assert found["chunks"] == [[40, 64], [40, 64]]
        assert found["none"] == 0
        assert 0 < found["int8"] < 0.01


# ---- nothing goes wrong silently -----------------------------------------------------------------


def test_a_gradient_that_is_not_finite_stops_all_ranks_at_once_and_for_good():
    """It is in the module whose backward pass ends last; every rank catches the error."""
    for job, size, culprit in (("silent", 2, 1), ("silent_replicas", 4, 1)):
        for found in of(job, size):
            said = f"rank {culprit}: the gradient of conv."
            for name in ("stop", "again", *(["again, a part"] if size == 2 else [])):
                assert found[name]["kind"] == "DivergedError"
                assert found[name]["text"].startswith(said)
                assert found[name]["seconds"] < 5


def test_a_gradient_that_is_not_finite_is_skipped_on_all_ranks():
    """Modules that were exchanged before in this backward pass take their residuals back."""
    for found in (*of("silent"), *of("silent_replicas", 4)):
        assert found["skip"]["kind"] == ""
        assert found["untouched"]
        assert found["nan"]
    for found in of("silent"):
        assert found["more bytes"] > 0, "there were such modules"
        assert found["counted"] == [3, 1]
        assert found["and on"]


def test_rates_come_from_the_optimizer_and_are_the_same_on_all_ranks():
    for found in of("silent"):
        assert found["optimizer"], "the same bits as a rate that is set before each backward"
        assert found["rates"]["kind"] == "UsageError"
        assert "hook.lr: rank 0 0.1, rank 1 1.1" in found["rates"]["text"]


@pytest.mark.parametrize(
    ("name", "said"),
    [("shape", r"shape \(1,\)"), ("dtype", "int8"), ("step", "=-5"), ("missing", "levels")],
)
def test_a_state_that_cannot_be_is_refused_by_what_is_wrong(name, said):
    for found in of("silent"):
        assert found[f"state, {name}"]["kind"] == "UsageError"
        assert re.search(said, found[f"state, {name}"]["text"])
        assert found["unchanged"]


def test_states_are_loaded_after_register_and_fit_a_distributed_checkpoint():
    for rank, found in enumerate(of("silent")):
        assert found["loaded"]
        assert found["dcp"] == [True, 3, rank]


def test_fields_change_by_step():
    """Two of four exchanges send half of the elements, and two a tenth."""
    for found in of("silent"):
        assert found["schedule"]
        assert 0.25 < found["bytes"] < 0.65


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "no fsdp": "a Net came, of which no module .*fully_shard: call that first.*comm_hook",
    "frozen": "no module with parameters that require a gradient",
    "double": "reduced in torch.float64.*reduce_dtype=torch.float32",
    "half": "reduced in torch.float16.*float16 overflows",
    "mixed": "hidden: gradients would be reduced in torch.bfloat16, torch.float32",
    "second hook": "has a reduce-scatter of its own already",
    "same hook": "registered already: make one for each model",
    "state of another rank": "that of rank 2 of 2, and this is rank",
    "state of other settings": "seed: 0 then, 3 now",
    "state of another format": "format 99: 3 expected",
    "state of another rank alone": "that of rank 2 of 2, and this is rank 1 of 2",
    "factor": "hidden: set_gradient_divide_factor.3.0. asks for a scaled sum.*scale the loss",
    "factor later": "neither a mean nor a sum.*scale the loss",
    "another group": "a process group of 1 ranks came, 2 expected",
}
KINDS_REFUSED = {
    "replicated": "is replicated and not sharded.*take gcbench.comm_hook",
    "tensor parallel": "hidden is tensor parallel.*Shard the model by FSDP alone",
    "all-reduce hook": "hidden has an all-reduce hook.*leave out replicas",
    "backend": "a process group has the backend 'fake' for cpu tensors.*needs 'gloo'",
    "backend of replicas": "a process group has the backend 'fake' for cpu tensors.*needs 'gloo'",
    "several meshes": "has parameters on several meshes.*each with one mesh",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_refused_on_every_rank(name):
    for found in of("refusals"):
        assert found[name]["kind"] == "UsageError"
        assert re.search(REFUSED[name], found[name]["text"])
        assert found[name]["seconds"] < 5


@pytest.mark.parametrize("name", KINDS_REFUSED)
def test_models_that_cannot_be_carried_are_refused_on_every_rank(name):
    for found in of("refused_kinds"):
        if "skipped" in found[name]:
            pytest.skip(found[name]["skipped"])
        assert found[name]["kind"] == "UsageError"
        assert re.search(KINDS_REFUSED[name], found[name]["text"])
        assert found[name]["seconds"] < 5


def test_ranks_that_differ_all_say_in_what():
    for rank, found in enumerate(of("differences")):
        assert re.search("compressor: rank 0 .*TernGrad.*rank 1 .*QSGD", found["method"]["text"])
        assert "seed: rank 0 0, rank 1 1" in found["seed"]["text"]
        assert "rank 1 did not register a hook within 1 s" in found["absent"]["text"]
        assert found["absent"]["kind"] == ("UsageError" if rank else "PeerLostError")
        said = "rank 0: the gradient of branch.weight is not finite at step 0"
        assert said in found["nan"]["text"]
        assert found["nan"]["kind"] == "DivergedError"
        assert found["after"]["text"] == found["nan"]["text"], "and it is not gone at the next step"


@pytest.mark.parametrize("name", [n for n in COLLECTIVES if n not in (*METHODS, *RULES)])
def test_methods_that_need_every_element_everywhere_are_refused(name):
    with pytest.raises(UsageError, match=r"its shard alone, which is half of a twoshot exchange"):
        gcbench.shard_hook(name)


@pytest.mark.parametrize(
    ("words", "options", "said"),
    [
        (["terngard"], {}, "Did you mean 'terngrad'"),
        (["terngrad"], {"klip": 2}, "unknown field of compressor 'terngrad': 'klip'"),
        (["topk"], {"memory": "residul"}, "Did you mean 'residual'"),
        (["terngrad"], {"memory": "residual"}, "--memory none"),
        (["none"], {"dense_below": -1}, "dense_below=-1: at least 0"),
        (["none"], {"start_step": -1}, "start_step=-1: at least 0"),
        (["none"], {"between": "hadamrd4"}, "Did you mean 'hadamard4'"),
        (["none"], {"between": "qsgd", "between_options": {"bits": 2}}, "unknown field.*'bits'"),
        (["none"], {"between_options": {"levels": 2}}, "between_options=.* without between"),
        (["none"], {"between_memory": "none"}, "between_memory='none' without between"),
        (["none"], {"between_memory_options": {}}, "between_memory_options={} without between"),
        (["none"], {"between": "qsgd", "between_memory": "residual"}, "--memory none"),
        (
            ["none"],
            {"memory": "momentum", "between": "none", "between_memory": "dgc"},
            "would both apply momentum",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(words, options, said):
    with pytest.raises(UsageError, match=said):
        gcbench.shard_hook(*words, **options)


@dataclasses.dataclass(frozen=True)
class Joint(NoMemory):
    joint: ClassVar[tuple[str, ...]] = ("average",)


def test_a_memory_of_the_whole_mean_is_refused(monkeypatch):
    monkeypatch.setattr(chosen, "memory", lambda *words: Joint())
    with pytest.raises(UsageError, match=r"Joint\(\) keeps average of the whole mean"):
        gcbench.shard_hook("none")


def test_a_torch_with_other_internals_is_refused_with_the_versions_tried(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, torch.nn.Linear):
        def __new__(cls, *words):
            return object.__new__(cls)

        def _get_fsdp_state(self):
            return object()

    net = Sharded(2, 3)
    with pytest.raises(UsageError, match=r"does not hold parameters .*_fsdp_param_group.*2\.13"):
        gcbench.shard_hook("none").register(net)
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UsageError, match=r"has no FSDPModule.set_custom_reduce_scatter.*2\.13"):
        gcbench.shard_hook("none").register(net)


# ---- pieces --------------------------------------------------------------------------------------

SHAPES = [(13, 7), (5,), (1, 3), (8, 2, 3), (2, 1)]


def layout(size: int, dense: tuple[bool, ...] = (False, True, False, True, False)) -> Layout:
    made = [Parameter.of(f"p{i}", shape, 0, size) for i, shape in enumerate(SHAPES)]
    return Layout(tuple(made), dense, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_chunks_are_found_where_fsdp_puts_them(size):
    """By the operation that FSDP itself lays its input out with."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives

    made, start, gradients = layout(size), 1, []
    for shape in SHAPES:
        numel = torch.Size(shape).numel()
        gradients.append(torch.arange(start, start + numel, dtype=torch.float32).view(shape))
        start += numel
    given = torch.empty(size, made.row)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=size, out=given)
    taken = made.take(given.view(-1))
    for lane, x in zip(((0, 2, 4), (1, 3)), taken, strict=True):
        chunks = [gradients[i].chunk(size) for i in lane]
        wanted = [c[rank].reshape(-1) for rank in range(size) for c in chunks if rank < len(c)]
        assert torch.equal(x, torch.cat(wanted)), "without padding, rank by rank"
    for rank in range(size):
        back = torch.zeros(made.row)
        for lane, x in zip(made.lanes(), taken, strict=True):
            pieces = [piece for _, piece in made.pieces(lane, x, range(size))]
            own = torch.cat(pieces[rank * len(lane) : (rank + 1) * len(lane)])
            made.give(lane, own, back, rank)
        assert torch.equal(back, given[rank])
        again = torch.zeros(made.row)
        for lane, x in zip(made.lanes(), made.own(given[rank], rank), strict=True):
            assert x.numel() == sum(math.prod(p.chunks[rank]) for p in lane), "without padding"
            made.give(lane, x, again, rank)
        assert torch.equal(again, given[rank])


def test_no_segment_reaches_over_a_chunks_end():
    for granularity in ("tensor", "column", "model", 4):
        method = gcbench.get_compressor("terngrad", granularity=granularity)
        settings = fsdp.Settings(method, NoMemory(), 0, 0, 0)
        compressed, dense = fsdp.lanes(settings, layout(3), 100, 0)
        assert compressed.start == 100
        assert compressed.segments.numel == 13 * 7 + 3 + 2
        assert compressed.edges == (0, 5 * 7 + 3 + 1, 10 * 7 + 3 + 2, 13 * 7 + 3 + 2)
        assert {*compressed.edges} <= {*compressed.segments.offsets}
        assert dense.start == 100 + compressed.segments.numel
        assert dense.compressor == gcbench.get_compressor("none")
        assert dense.edges[-1] == 5 + 8 * 2 * 3


def test_memories_mask_nothing_where_all_is_sent():
    """Before `start_step`, of dense parameters, and of a method that keeps every element."""
    topk, every = (gcbench.get_compressor("topk", ratio=ratio) for ratio in (0.01, 1.0))
    for method, step, masks in ((topk, 2, False), (topk, 3, True), (every, 3, False)):
        settings = fsdp.Settings(method, Dgc(), 0, 3, 0)
        compressed, dense = fsdp.lanes(settings, layout(3), 0, step)
        assert compressed.memory.masks is masks
        assert not dense.memory.masks


def test_lanes_between_replicas_are_a_ranks_own_chunks():
    """By the method's first collective; dense parameters, and all before `start_step`, in fp32."""
    none, topk = gcbench.get_compressor("none"), gcbench.get_compressor("topk")
    between = fsdp.Between(topk, "allgather", Dgc())
    settings = fsdp.Settings(none, NoMemory(), 0, 3, 0, between)
    for rank, large, small in ((0, 5 * 7 + 3 + 1, 2 + 3 * 6), (2, 3 * 7, 1 + 2 * 6)):
        early = fsdp.replica_lanes(settings, layout(3), rank, 100, 2)
        late = fsdp.replica_lanes(settings, layout(3), rank, 100, 3)
        for lanes in (early, late):
            assert [lane.start for lane in lanes] == [100, 100 + large]
            assert [lane.segments.numel for lane in lanes] == [large, small]
        assert [lane.compressor for lane in early] == [none, none]
        assert [lane.collective for lane in early] == ["allreduce", "allreduce"]
        assert [lane.compressor for lane in late] == [topk, none]
        assert [lane.collective for lane in late] == ["allgather", "allreduce"]
        assert [lane.memory for lane in late] == [Dgc(), Dgc().dense()]
        assert [lane.memory for lane in early] == [Dgc().dense()] * 2
    nobody = Layout((Parameter.of("p", (2, 3), 0, 3),), (False,), 3)
    (empty,) = fsdp.replica_lanes(settings, nobody, 2, 0, 3)
    assert empty.segments.numel == 0
    without = dataclasses.replace(settings, between=None)
    assert fsdp.replica_lanes(without, layout(3), 0, 0, 3) == []


# ---- the page ------------------------------------------------------------------------------------


def test_the_example_of_the_guide_trains(tmp_path):
    text = (ROOT / "gcbench/docs/your-job.md").read_text()
    (example,) = re.findall(r"```python\n(# shard\.py\n.*?)```", text, re.DOTALL)
    printed = jobs.run_program(example, tmp_path)
    assert all(re.search(r"3\.\d times fewer bytes", each) for each in printed)
