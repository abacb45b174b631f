"""Compressors in a user's FSDP2 job: equal to the first half of gcbench's own two-shot exchange.

Jobs of real processes are in fsdp_jobs.py; they are started once for each number of processes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from pathlib import Path
from typing import ClassVar

import ddp_jobs
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
from gcbench.integrations import fsdp, scheme, sharded
from gcbench.integrations.hook import Copied, Observer
from gcbench.integrations.layout import Layout, Parameter
from gcbench.integrations.scheme import Scheme

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
COLLECTIVES = {n: gcbench.get_compressor(n).legal_collectives() for n in registry.compressors()}
RULES = [n for n in COLLECTIVES if not gcbench.get_compressor(n).rule.plain]
METHODS = [name for name in ddp_jobs.representatives(("twoshot",)) if name not in RULES]
GRID = [
    *("hybrid", "silent_replicas", "unfrozen_replicas"),
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
def test_each_kind_of_method_equals_the_reference_exchange(name):
    """Bit for bit; with four ranks some chunks are short, and some empty."""
    every = JOBS.method(name)
    assert len({result["end"] for result in every}) == 1
    for result in every:
        assert result["equal"], f"{result['far']} apart"
        assert result["modules"] == 3
        assert result["up"] < 0.55
        assert result["resumed"], "a job that went on from a saved state"


def test_the_comparison_notices_a_difference():
    for result in of("broken"):
        assert not result["seed"]
        assert not result["place"]


@pytest.mark.parametrize("size", [2, 4])
def test_no_compression_equals_plain_fsdp(size):
    """With two ranks the same bits; with four a sum in another order, in bfloat16 a rounded one."""
    for result in of("plain", size):
        for kind in ("float32", "sum", "grouped"):
            assert result[kind] <= (0 if size == 2 else 1e-7)
        assert result["bfloat16"] <= (0 if size == 2 else 1e-3)
        assert result["moved"] > 0.1
        assert result["bytes"], "padding is not sent"


def test_replicas_equal_torchs_hybrid_sharding():
    for result in of("hybrid", 4):
        assert result["native"] == 0
        assert result["shards of one rank"] < 1e-7
        assert result["bytes"]
        for name in ("none", "qsgd", "onebit"):
            assert result[name], "its own exchange, with other random numbers in each replica"
        assert 'fully_shard(..., mesh=mesh["shard"])' in result["two dimensions"]["text"]
        assert "a mesh of 2 dimensions" in result["replicas of two dimensions"]["text"]
        assert re.search(r"seed: rank \d 0, rank \d 1", result["odd"]["text"])
        assert result["odd"]["seconds"] < jobs.PROMPT


def test_votes_that_were_clipped_before_their_step_are_named():
    """Not means, nor a warm-up in fp32, nor votes that two backward passes added."""
    for result in of("directions"):
        del result["seconds"]
        warned = {key for key, texts in result.items() if any("clip_grad" in x for x in texts)}
        votes = ("", "scaler ", "dense_below mp_policy ")
        clipped = {*(f"signsgd {options}clipped" for options in votes), "signsgd clipped, summed"}
        assert warned == clipped
        assert all(sum("clip_grad" in x for x in result[key]) == 1 for key in warned)


def test_fp32_between_replicas_is_the_default():
    for result in of("two_levels", 4):
        assert result["none"], "bit for bit"
        assert result["none bytes"] == result["own bytes"], "padding is not sent"


@pytest.mark.parametrize("name", fsdp_jobs.kinds())
def test_two_levels_equal_the_reference_exchanges_in_turn(name):
    """One method of each kind between replicas; the job of another method is the same."""
    every = [result["methods"][name] for result in of("two_levels", 4)]
    assert len({result["end"] for result in every}) == 1, "replicas are the same"
    for result in every:
        assert result["equal"]
        assert result["differs"]
        assert ("resumed" in result) == (name in fsdp_jobs.resumable())
        assert result.get("resumed", True), "a job that went on from a saved state"


def test_the_tested_methods_between_replicas_cover_all_kinds():
    methods = [gcbench.get_compressor(name) for name in fsdp_jobs.kinds()]
    assert {method.legal_collectives()[0] for method in methods} == {
        "allreduce",
        "allgather",
        "twoshot",
    }
    assert {method.memory for method in methods} == {"none", "residual"}
    resumed = [method.memory for method in methods if method.name in fsdp_jobs.resumable()]
    assert {*resumed} == {"none", "residual"}
    assert any(isinstance(method, MultiRoundCompressor) for method in methods)


def test_each_option_for_replicas_equals_the_reference_exchanges():
    every = of("two_levels_options", 4)
    for result in every:
        assert {name for name, equal in result["equal"].items() if not equal} == set()
        assert len(result["equal"]) == 11
        assert result["ends"] == every[0]["ends"], "replicas are the same"
        assert result["plain of one"]
    assert len({*every[0]["ends"].values()}) == 7, "each option matters"


def declared(method: str, shapes: list[tuple[int, ...]]) -> int:
    """Return the bytes of a payload of tensors of these shapes."""
    codec = gcbench.get_compressor(method)
    layout = codec.layout(Segments.of(shapes, codec.granularity))
    assert layout is not None
    return layout_bytes(layout)


def test_two_levels_send_eight_bits_inside_and_four_between():
    """As layouts declare for the chunks of each module's large parameters, and fp32 of others."""
    for result in of("two_levels_options", 4):
        inside = between = elements = own_elements = small = own_small = 0
        for chunks in result["chunks"].values():  # of a module: of each parameter, of each rank
            large = [each for each in chunks if sum(map(math.prod, each)) >= 50]
            others = [each for each in chunks if each not in large]
            for rank in (0, 1):
                inside += declared("int8", [each[rank] for each in large])
                elements += sum(math.prod(each[rank]) for each in large)
                small += sum(math.prod(each[rank]) for each in others)
            between += declared("hadamard4", [each[result["shard"]] for each in large])
            own_elements += sum(math.prod(each[result["shard"]]) for each in large)
            own_small += sum(math.prod(each[result["shard"]]) for each in others)
        up, up_between = result["up"]
        assert up_between == fsdp_jobs.STEPS * (between + 4 * own_small)
        assert up - up_between == fsdp_jobs.STEPS * (inside + 4 * small)
        assert 8 < 8 * inside / elements < 8.3
        assert 4 < 8 * between / own_elements < 4.6
        assert {"statistic", "encode", "communicate", "decode"} <= {*result["phases"]}


def test_broken_levels_are_noticed():
    every = of("two_levels_broken", 4)
    assert len({result["right"] for result in every}) == 1
    for result in every:  # replicas that drew other positions have other means
        assert result["seeds"]["kind"] == "UsageError"
        assert "mean: rank" in result["seeds"]["text"]
    assert not any(result["shared draws"] for result in every)


TWO_LEVELS_REFUSED = {
    "no replicas": "between=QSGD.*replicas=",
    "wrong replicas": r"shard of each module.*: rank \d .0, 0, 0., rank",
    "apart": r"parameters .digest.: rank \d '.*load the same parameters",
    "method": r"between compressor: rank \d .*Hadamard4.*rank \d .*QSGD",
    "absent": r"between compressor: rank \d .*Hadamard4.*rank \d None",
    "field": r"between compressor: rank \d .*levels=3.*rank \d .*levels=4",
    "memory": r"between memory: rank \d .*Residual.*rank \d .*NoMemory",
    "code of memory": r"settings\. between code of memory: rank \d '\w+', rank \d '\w+'\. Make",
    "state without": "between compressor: '.*Hadamard4.*None",
    "state of another": "between compressor: .*Hadamard4.*Int8",
}


@pytest.mark.parametrize("name", TWO_LEVELS_REFUSED)
def test_invalid_levels_are_refused_on_every_rank(name):
    for result in of("two_levels_refused", 4):
        assert result[name]["kind"] == "UsageError"
        assert re.search(TWO_LEVELS_REFUSED[name], result[name]["text"])
        assert result[name]["seconds"] < jobs.PROMPT


def test_replicas_that_are_not_passed_are_named():
    for result in of("two_levels_refused", 4):
        (text,) = result["forgotten"]
        assert 'hook.register(model, replicas=mesh["replicate"])' in text
        assert result["stages"] == result["flattened"] == []


def test_a_non_finite_gradient_is_noticed_in_a_module_of_one_shard():
    for result in of("two_levels_refused", 4):
        assert result["nan"]["kind"] == "DivergedError"
        assert "rank 0: the gradient of branch.weight is not" in result["nan"]["text"]


OPTIONS = ("start", "seed", "field", "model", "memory", "decay", "resumed at the start")


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_equals_the_reference_exchange(name):
    for result in of("options"):
        assert result[name]


def test_residuals_follow_the_learning_rate_of_the_hook():
    for result in of("learning_rate"):
        assert result["equal"]
        assert result["resumed"], "with the rate of its state"
        assert result["matters"]


def test_steps_of_one_shard_are_counted():
    """Nothing is exchanged, and the user's all-reduce hook is still called."""
    for result in of("one_shard"):
        assert result["equal"]
        assert result["bytes"] == [0, 0]
        assert result["steps"] == [fsdp_jobs.STEPS, fsdp_jobs.STEPS]
        assert result["theirs"] == fsdp_jobs.STEPS
        (text,) = result["momentum"]
        assert "has one shard" in text
        assert "applies no momentum" in text


def test_accumulated_gradients_are_exchanged_once():
    for result in of("accumulation"):
        assert result["equal"]
        assert result["steps"] == fsdp_jobs.STEPS


def test_a_parameter_without_a_gradient_is_reported_or_sent_as_zeros():
    for result in of("unused"):
        assert result["refused"]["kind"] == "UsageError"
        message = "the root module: .*240 .*486"
        assert re.search(message, result["refused"]["text"])
        names_it = "set_reduce_scatter_unused_params" in result["refused"]["text"]
        assert names_it == sharded.takes_unused()
    if not sharded.takes_unused():
        pytest.skip("this torch has no set_reduce_scatter_unused_params")
    for result in of("unused"):
        assert result["equal"]


def test_a_weight_may_be_sharded_along_another_axis():
    for result in of("placement"):
        assert result["chunks"] == [[40, 64], [40, 64]]
        assert result["none"] == 0
        assert 0 < result["int8"] < 0.01


# ---- nothing goes wrong silently -----------------------------------------------------------------


def test_a_non_finite_gradient_stops_all_ranks_at_once_and_for_good():
    """It is in the module whose backward pass ends last; every rank catches the error."""
    for job, size, culprit in (("silent", 2, 1), ("silent_replicas", 4, 1)):
        for result in of(job, size):
            message = f"rank {culprit}: the gradient of conv."
            for name in ("stop", "again", *(["again, a part"] if size == 2 else [])):
                assert result[name]["kind"] == "DivergedError"
                assert result[name]["text"].startswith(message)
                assert result[name]["seconds"] < jobs.PROMPT


def test_a_non_finite_gradient_is_skipped_on_all_ranks():
    """Modules already exchanged in this backward pass restore their residuals."""
    for result in (*of("silent"), *of("silent_replicas", 4)):
        assert result["skip"]["kind"] == ""
        assert result["untouched"]
        assert result["nan"]
    for result in of("silent"):
        assert result["more bytes"] > 0, "there were such modules"
        assert result["counted"] == [3, 1]
        assert result["and on"]


def test_warnings_about_steps_name_calls_that_the_hook_has():
    for result in of("replaced"):
        assert ["0.01" in text for text in result["texts"]] == [True, False]
        assert result["missing"] == []


def test_a_model_that_returns_to_an_earlier_step_without_the_hook_causes_a_warning():
    for result in of("rolled_back"):
        (text,) = result["model"]
        assert "load_state_dict changed parameters before step 3" in text
        assert result["model, hook"] == []


def test_a_skipped_step_reverts_no_exchange_of_another_backward_pass():
    for result in of("parts"):
        assert result["skipped"] == 1
        assert result["equal"], "the first module trains as without the second one"


def test_a_skipped_step_reverts_all_exchanges_of_its_backward_pass():
    for result in of("joint_parts"):
        assert result["skipped"] == 1
        assert result["equal"], "the first module trains as without this step"


def test_rates_and_fields_that_change_at_a_skipped_step_are_followed():
    """In all modules; the updates that residuals stand for do not change."""
    for result in of("skipped_rates"):
        assert result["skipped"] == 1
        assert result["more bytes"] > 0, "some modules were exchanged before the fault"
        assert result["exchanges"] == [[0.125, 0.25]] * 3
        assert result["not zero"]
        assert result["equal"]


def test_a_loss_scale_changes_nothing():
    """Powers of two: bit for bit the parameters of a job without a scaler."""
    for result in (*of("loss_scales"), *of("two_levels_scales", 4)):
        assert all(result["equal"].values()), result["equal"]


def test_rates_come_from_the_optimizer_and_must_agree():
    for result in of("silent"):
        assert result["optimizer"], "the same bits as a rate that is set before each backward"
        assert result["rates"]["kind"] == "UsageError"
        assert "hook.lr: rank 0 0.1, rank 1 1.1" in result["rates"]["text"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(("shape", r"shape \(1,\)"), ("dtype", "int8"), ("step", "=-5"), ("missing", "levels")),
        ("empty", "rank 0 of 2"),
    ],
)
def test_an_invalid_state_is_refused_with_the_invalid_value(name, message):
    for result in of("silent"):
        assert result[f"state, {name}"]["kind"] == "UsageError"
        assert re.search(message, result[f"state, {name}"]["text"])
        assert result["unchanged"]


def test_states_are_loaded_after_register_and_fit_a_distributed_checkpoint():
    for rank, result in enumerate(of("silent")):
        assert result["loaded"]
        assert result["dcp"] == [True, 3, rank]


def test_fields_change_by_step():
    """Two of four exchanges send half of the elements, and two a tenth."""
    for result in of("silent"):
        assert result["schedule"]
        assert 0.25 < result["bytes"] < 0.65


# ---- refusals ------------------------------------------------------------------------------------

REFUSED = {
    "no fsdp": "Net.*fully_shard.*comm_hook",
    "frozen": "Net.*require a gradient",
    "double": "torch.float64.*reduce_dtype=torch.float32",
    "half": "torch.float16.*reduce_dtype=torch.float32",
    "mixed": "hidden: .*torch.bfloat16, torch.float32",
    "second hook": "custom reduce-scatter",
    "same hook": "registered already: make one for each model",
    "state of another rank": "that of rank 2 of 2, and this is rank",
    "state of other settings": "seed: 0 .*, 3 ",
    "state of another format": "format 99: expected 4",
    "state of another rank alone": "that of rank 2 of 2, and this is rank 1 of 2",
    "factor": "hidden: set_gradient_divide_factor.3.0..*scale the loss",
    "factor later": "set_gradient_divide_factor.*scale the loss",
    "another group": "process group of 1 ranks.* 2",
}
KINDS_REFUSED = {
    "replicated": "replicated.*gcbench.comm_hook",
    "tensor parallel": "hidden is tensor parallel",
    "all-reduce hook": "hidden has an all-reduce hook.*leave out replicas",
    "backend": "a process group has the backend 'fake' for cpu tensors.*needs 'gloo'",
    "backend of replicas": "a process group has the backend 'fake' for cpu tensors.*needs 'gloo'",
    "several meshes": "several meshes",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_uses_are_refused_on_every_rank(name):
    for result in of("refusals"):
        assert result[name]["kind"] == "UsageError"
        assert re.search(REFUSED[name], result[name]["text"])
        assert result[name]["seconds"] < jobs.PROMPT


def test_a_hook_is_registered_after_a_refusal_with_another_optimizer():
    for result in of("refusals"):
        assert result["half again"]["kind"] == "UsageError"
        assert result["corrected"]["text"] == ""
        assert result["corrected"]["observers"] == 0, "of the optimizer of the refused call"


@pytest.mark.parametrize("name", ["part", "root", "root, reentrant"])
def test_activation_checkpointing_changes_no_bit(name):
    for result in of("checkpointed"):
        assert result[name]["text"] == ""
        assert result[name]["steps"] == fsdp_jobs.STEPS
        assert result[name]["end"] == result["none"]["end"]


def test_discarded_exchanges_are_named_and_accumulated_ones_are_not():
    for result in of("repeated"):
        assert result["accumulated"] == result["accumulated, saved"] == []
        assert result["momentum"] == []
        (text,) = result["momentum, accumulated"]
        assert "advances its momentum at each of several backward passes" in text
        (text,) = result["discarded later, saved"]
        assert "no optimizer has applied the last exchanged gradient" in text
        for name in ("discarded", "discarded later"):
            (text,) = result[name]
            assert re.search(r"exchanges the gradient of \S+ 2 times per step of SGD", text)


def test_an_optimizer_of_parameters_that_a_load_replaced_is_refused():
    for result in of("assigned"):
        assert "the optimizer has none of the model's parameters" in result["stale"]["text"]
        assert result["later"]["text"] == ""


def test_a_pickled_model_has_no_hook():
    observer = Observer(gcbench.shard_hook("int8")._after_forward)
    for each in (pickle.loads(pickle.dumps(observer)), copy.deepcopy(observer)):
        assert isinstance(each, Copied)
        each(torch.nn.Linear(1, 1))  # it does not warn


def test_a_module_unfrozen_after_register_is_named():
    """Without replicas once in a warning; with them every rank stops."""
    for result in of("unfrozen"):
        assert len(result["warned"]) == 1
        assert "branch.weight" in result["warned"][0]
    for result in of("unfrozen_replicas", 4):
        assert result["branch"]["kind"] == "UsageError"
        assert "branch.weight" in result["branch"]["text"]
        assert result["nothing"]["text"] == ""


@pytest.mark.parametrize("name", ["all", "one", "gathered"])
def test_a_parameter_does_not_get_the_residual_of_another_of_its_size(name):
    for result in of("swapped"):
        assert result[name]["kind"] == "UsageError"
        assert re.search(r"1\.weight did not .* and 0\.weight did", result[name]["text"])


@pytest.mark.parametrize("name", KINDS_REFUSED)
def test_unsupported_models_are_refused_on_every_rank(name):
    for result in of("refused_kinds"):
        if "skipped" in result[name]:
            pytest.skip(result[name]["skipped"])
        assert result[name]["kind"] == "UsageError"
        assert re.search(KINDS_REFUSED[name], result[name]["text"])
        assert result[name]["seconds"] < jobs.PROMPT


def test_the_autocast_of_the_caller_does_not_apply_to_an_exchange():
    assert all(result["equal"] for result in of("autocast"))


def test_ranks_that_differ_all_name_the_difference():
    for rank, result in enumerate(of("differences")):
        assert re.search("compressor: rank 0 .*TernGrad.*rank 1 .*QSGD", result["method"]["text"])
        assert "seed: rank 0 0, rank 1 1" in result["seed"]["text"]
        assert "rank 1 did not call register" in result["absent"]["text"]
        assert result["absent"]["kind"] == ("UsageError" if rank else "PeerLostError")
        message = "rank 0: the gradient of branch.weight is not finite at step 0"
        assert message in result["nan"]["text"]
        assert result["nan"]["kind"] == "DivergedError"
        assert result["after"]["text"] == result["nan"]["text"], "also at the next step"


@pytest.mark.parametrize(
    "name", [n for n, legal in COLLECTIVES.items() if "twoshot" not in legal and n not in RULES]
)
def test_methods_without_twoshot_are_refused(name):
    with pytest.raises(UsageError, match="twoshot"):
        gcbench.shard_hook(name)


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
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
def test_wrong_arguments_are_refused_at_once(words, options, message):
    with pytest.raises(UsageError, match=message):
        gcbench.shard_hook(*words, **options)


@dataclasses.dataclass(frozen=True)
class Joint(NoMemory):
    joint: ClassVar[tuple[str, ...]] = ("average",)


def test_a_memory_of_the_whole_mean_is_refused(monkeypatch):
    monkeypatch.setattr(scheme, "_memory", lambda *words: Joint())
    with pytest.raises(UsageError, match=r"Joint\(\).*average"):
        gcbench.shard_hook("none")


def test_a_torch_with_other_internals_is_refused_with_the_tested_versions(monkeypatch):
    from torch.distributed.fsdp import FSDPModule

    class Sharded(FSDPModule, torch.nn.Linear):
        def __new__(cls, *words):
            return object.__new__(cls)

        def _get_fsdp_state(self):
            return object()

    net = Sharded(2, 3)
    with pytest.raises(UsageError, match=r"_fsdp_param_group.*2\.13"):
        gcbench.shard_hook("none").register(net)
    monkeypatch.delattr(FSDPModule, "set_custom_reduce_scatter")
    with pytest.raises(UsageError, match=r"FSDPModule.set_custom_reduce_scatter.*2\.13"):
        gcbench.shard_hook("none").register(net)


# ---- pieces --------------------------------------------------------------------------------------

SHAPES = [(13, 7), (5,), (1, 3), (8, 2, 3), (2, 1)]


def layout(size: int, dense: tuple[bool, ...] = (False, True, False, True, False)) -> Layout:
    parameters = [Parameter.of(f"p{i}", shape, 0, size) for i, shape in enumerate(SHAPES)]
    return Layout(tuple(parameters), dense, size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_chunks_lie_where_fsdp_puts_them(size):
    """According to the operation with which FSDP itself lays out its input."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives

    positions, start, gradients = layout(size), 1, []
    for shape in SHAPES:
        numel = torch.Size(shape).numel()
        gradients.append(torch.arange(start, start + numel, dtype=torch.float32).view(shape))
        start += numel
    rows = torch.empty(size, positions.row)
    torch.ops.fsdp.chunk_cat(gradients, dim=0, num_chunks=size, out=rows)
    taken = positions.take(rows.view(-1), range(size))
    for lane, x in zip(((0, 2, 4), (1, 3)), taken, strict=True):
        chunks = [gradients[i].chunk(size) for i in lane]
        expected = [c[rank].reshape(-1) for rank in range(size) for c in chunks if rank < len(c)]
        assert torch.equal(x, torch.cat(expected)), "without padding, rank by rank"
    for rank in range(size):
        row = torch.zeros(positions.row)
        chunks = positions.take(rows[rank], [rank])
        for number, (lane, x) in enumerate(zip(positions.lanes(), chunks, strict=True)):
            assert x.numel() == sum(math.prod(p.chunks[rank]) for p in lane), "without padding"
            assert x.numel() == sum(size for _, size in positions.parts([rank])[number])
            positions.give(lane, x, row, rank)
        assert torch.equal(row, rows[rank])


def settings_of(compressor, memory, *, start_step=0, between=None):
    return fsdp.Settings(
        compressor=compressor,
        collective="twoshot",
        memory=memory,
        dense_below=0,
        start_step=start_step,
        seed=0,
        timeout=60.0,
        on_nonfinite="stop",
        between=between,
    )


def test_no_segment_crosses_the_end_of_a_chunk():
    for granularity in ("tensor", "column", "model", 4):
        method = gcbench.get_compressor("terngrad", granularity=granularity)
        settings = settings_of(method, NoMemory())
        compressed, dense = fsdp.lanes(settings, layout(3), 100, 0)
        assert compressed.start == 100
        assert compressed.segments.numel == 13 * 7 + 3 + 2
        assert compressed.edges == (0, 5 * 7 + 3 + 1, 10 * 7 + 3 + 2, 13 * 7 + 3 + 2)
        assert {*compressed.edges} <= {*compressed.segments.offsets}
        assert dense.start == 100 + compressed.segments.numel
        assert dense.compressor == gcbench.get_compressor("none")
        assert dense.edges[-1] == 5 + 8 * 2 * 3


def test_memories_mask_nothing_if_all_is_sent():
    """Before `start_step`, for dense parameters, and for a method that sends every element."""
    topk, every = (gcbench.get_compressor("topk", ratio=ratio) for ratio in (0.01, 1.0))
    for method, step, masks in ((topk, 2, False), (topk, 3, True), (every, 3, False)):
        settings = settings_of(method, Dgc(), start_step=3)
        compressed, dense = fsdp.lanes(settings, layout(3), 0, step)
        assert compressed.memory.masks is masks
        assert not dense.memory.masks


def test_lanes_between_replicas_are_the_chunks_of_one_rank():
    """By the method's first collective; dense parameters, and all before `start_step`, in fp32."""
    none, topk = gcbench.get_compressor("none"), gcbench.get_compressor("topk")
    between = Scheme(compressor=topk, collective="allgather", memory=Dgc())
    settings = settings_of(none, NoMemory(), start_step=3, between=between)
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
    short = Layout((Parameter.of("p", (2, 3), 0, 3),), (False,), 3)
    (empty,) = fsdp.replica_lanes(settings, short, 2, 0, 3)
    assert empty.segments.numel == 0
    default = dataclasses.replace(settings, between=None)
    for lane in fsdp.replica_lanes(default, layout(3), 0, 0, 3):
        assert (lane.compressor, lane.collective) == (none, "allreduce")


# ---- the page ------------------------------------------------------------------------------------


def test_the_example_of_the_guide_trains(tmp_path):
    text = (ROOT / "gcbench/docs/your-job.md").read_text()
    (example,) = re.findall(r"```python\n(# shard\.py\n.*?)```", text, re.DOTALL)
    printed = jobs.run_program(example, tmp_path)
    assert all(re.search(r"3\.\d times fewer bytes", each) for each in printed)
