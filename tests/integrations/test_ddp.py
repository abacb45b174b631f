"""Compressors in a user's DistributedDataParallel job: equal to gcbench's own exchange, no traps.

Jobs of real processes are in ddp_jobs.py; they are started once for each number of processes.
"""

from __future__ import annotations

import math
import re
import threading
from pathlib import Path

import ddp_jobs
import jobs
import pytest
import torch
from gcbench.compressors.memories.residual import Residual

import gcbench
from gcbench.core import memory, registry
from gcbench.core.clock import Clock
from gcbench.core.compressor import Segments
from gcbench.core.errors import UsageError
from gcbench.core.exchange import Exchange, Lane, shard_bounds
from gcbench.integrations import check, scheme
from gcbench.integrations import plan as plans
from gcbench.integrations.agreement import digest
from gcbench.integrations.ddp import RECORDS, _strided
from gcbench.integrations.plan import Placed, Plan
from gcbench.integrations.worker import Worker

pytestmark = pytest.mark.usefixtures("forked")

ROOT = Path(__file__).parents[2]
METHODS = [*dict.fromkeys([*ddp_jobs.representatives(), *ddp_jobs.resumable()])]
RESIZED = ("resized", "grown")
JOBS = jobs.Jobs(
    "ddp_jobs",
    METHODS,
    {
        2: [name for name in ddp_jobs.JOBS if name not in RESIZED],
        3: ["plain", "rebuilt", "unused", "two_models", "differences", *RESIZED],
    },
)
of = JOBS.of


# ---- equal to the exchange -----------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_each_kind_of_method_equals_the_reference_exchange(name):
    """Bit for bit, by each legal collective, checked at every other step with no false alarm."""
    for result in JOBS.method(name):
        assert set(result) == set(gcbench.get_compressor(name).legal_collectives())
        for collective, each in result.items():
            assert each["equal"], f"{collective}: {each['far']} apart"
            assert each["end"] == JOBS.method(name)[0][collective]["end"]
            assert each["lanes"] == 4, "two of compressed tensors, two of dense ones"
            assert each["up"] < 0.6 or name == "none"


@pytest.mark.parametrize("name", ddp_jobs.resumable())
def test_a_resumed_job_ends_in_the_bits_of_an_uninterrupted_one(name):
    for result in JOBS.method(name):
        assert [each["resumed"] for each in result.values() if "resumed" in each] == [True]


@pytest.mark.parametrize("size", [2, 3])
def test_no_compression_is_plain_ddp_within_rounding(size):
    """A sum of `size` float32 numbers in another order, five steps of a rate of 0.1."""
    for result in of("plain", size):
        assert result["far"] < 1e-6 < 0.1 < result["moved"]


@pytest.mark.parametrize("size", [2, 3])
def test_buckets_are_rebuilt_and_nothing_changes(size):
    result = of("rebuilt", size)
    first, second = result[0]["orders"][:2]
    assert first != second, "DDP changed the order"
    assert sorted(first) == sorted(second)
    for each in result:
        assert each["lanes"] == result[0]["lanes"], "all ranks exchange in one order"
        assert each["equal"], "other buckets, same bits"


def test_options_of_ddp_and_of_the_hook_equal_the_reference_exchange():
    for result in of("options"):
        assert {name for name, equal in result.items() if name != "seconds" and not equal} == set()
        assert len(result) == 9 + 1


@pytest.mark.parametrize("name", ["autocast", "bfloat16", "no_sync"])
def test_precision_and_accumulation(name):
    for result in of(name):
        assert result["equal"]
    assert of("no_sync")[0]["steps"] == ddp_jobs.STEPS


def test_torch_compile_does_not_trace_the_hook():
    for result in of("compiled"):
        assert result["equal"]
        assert result["texts"] == []


def test_shapes_and_segments_follow_the_strides_of_channels_last():
    for result in of("channels_last"):
        assert result["permuted"]
        assert result["onebit"]
        assert result["powersgd"]


def test_residuals_follow_the_learning_rate_of_the_hook():
    for result in of("learning_rate"):
        assert result["equal"]
        assert result["matters"]


def test_a_resumed_job_continues_with_the_learning_rate_of_its_state():
    for result in of("resumed_rate"):
        assert result["kept"], "residuals were rescaled"
        assert result["set"]
        assert result["matters"]


def test_a_job_is_resumed_around_its_first_compressed_step():
    for result in of("resumed_start"):
        result = {name: value for name, value in result.items() if name != "seconds"}
        assert len(result) == 4
        assert all(result.values()), result


def test_skipped_steps_are_no_warm_up():
    """Without them a job ends in the same bits. The parameters had not moved: nothing had computed
    the second moment that the update rule divides by."""
    for result in of("skipped_warm_up"):
        assert result["moved"]
        assert result["equal"]


def test_directions_that_were_clipped_before_their_step_are_named():
    """Not means, nor the steps of a warm-up in fp32, which are those of the gradient."""
    clipped = {"signsgd ", "onebitadam start_step", "dlion ", "signsgd scaler"}
    for result in of("directions"):
        lists = {key: texts for key, texts in result.items() if isinstance(texts, list)}
        warned = {key for key, texts in lists.items() if any("clip_grad" in x for x in texts)}
        assert warned == {f"{name}, clipped" for name in clipped}
        assert all(len(result[key]) == 1 for key in warned)
        assert result["one rank"] == []


def test_a_parameter_without_a_gradient_in_a_warm_up_is_named():
    for result in of("idle_in_warm_up"):
        (text,) = result["step 1"]
        assert "no rank used branch." in text
        assert result["step 3"] == []


def test_a_mean_at_the_rate_0_is_compared_with_what_was_sent():
    """The comparison had included residuals, which the exchange sets aside there."""
    for result in of("checked_at_rest"):
        assert result["record"] == pytest.approx(result["apart"], rel=1e-5)


def test_a_shared_weight_is_ignored_only_by_all_its_names():
    first, second = of("tied")
    for names in ("first.weight", "second.weight", "first.weight, second.weight"):
        for result in (first, second):
            assert result[names]["far"] < 1e-6
            assert result[names]["texts"] == []
        same = first[names]["mean"] == second[names]["mean"]
        assert same == ("," not in names)


@pytest.mark.parametrize("make", [gcbench.comm_hook, gcbench.shard_hook])
def test_an_assigned_rate_takes_precedence_over_that_of_a_state(make):
    """In either order; a state from before the first exchange has no rate."""
    for rate in (0.01, None):
        hook = make("onebit")
        assert hook.lr is None
        state = {"rank 0 of 2": {"format": hook.FORMAT, "lr": rate}}
        hook.load_state_dict(state)
        assert hook.lr == rate
        hook.lr = 0.5
        assert hook.lr == 0.5
        hook = make("onebit")
        hook.lr = 0.25
        hook.load_state_dict(state)
        assert hook.lr == 0.25


@pytest.mark.parametrize("make", [gcbench.comm_hook, gcbench.shard_hook])
def test_an_empty_state_before_register_starts_afresh_with_a_warning(make):
    """It is what such a hook's `state_dict` returns; from a checkpoint it loses the residuals."""
    hook = make("onebit")
    with pytest.warns(UserWarning, match="empty"):
        hook.load_state_dict(make("onebit").state_dict())
    assert hook.state_dict() == {}


# ---- traps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["onebit", "powersgd", "topk"])
def test_the_state_of_an_unused_parameter_waits(name, size):
    """No rank uses the branch at step 2, so DDP drops its mean; at step 3 only rank 0 does."""
    every = [result[name] for result in of("unused", size)]
    for result in every:
        assert result["none"] == [False, False, True, False, False]
        assert result["carried"]
        assert result["kept"]
        assert result["moves on"]
        assert result["earlier gradient"] == [True, True], "it stays, and is not sent again"
        assert "branch.weight" not in result["compared at 2"]
        assert "hidden.weight" in result["compared at 2"]
    assert len({result["sum"] for result in every}) == 1, "replicas are the same"
    assert all(result["equal"] for result in of("stale"))


def test_one_rank_only_counts_steps():
    for rank, result in enumerate(of("one_rank")):
        assert result["equal"]
        assert result["bytes"] == [0, 0, []]
        carried = {"lr": 0.5, "rank": 0, "world_size": 1, "exchange": None}
        assert result["state"] == {"step": ddp_jobs.STEPS, **carried}
        assert result["resumed"] == [ddp_jobs.STEPS, 0.5]
        assert result["then"] == ddp_jobs.STEPS + 2
        saved = f"that of rank 0 of 1, global ranks {rank}, and this is rank {rank} of"
        assert saved in result["more ranks"]["text"]


def test_states_of_several_process_groups_are_not_mixed():
    """As torch.distributed.checkpoint would, which saves one of several equal keys."""
    for rank, result in enumerate(of("group_states")):
        assert result["keys"] == ["rank 0 of 1, global ranks 0", "rank 0 of 1, global ranks 1"]
        assert result["step"] == ddp_jobs.STEPS
        assert f"this is rank 0 of 1, global ranks {rank}:" in result["another"]["text"]


def test_a_momentum_of_the_memory_is_applied_on_one_rank():
    """Within rounding; without momentum the parameters are .1 apart."""
    for result in of("one_rank_momentum"):
        assert result["far"] < 1e-6


def test_a_closed_hook_still_has_its_state_and_is_freed_before_its_module():
    for result in of("closed"):
        assert result["freed"]
        assert result["step"] == 2
        assert result["keys"]
        assert result["same"]


def test_two_models_one_of_them_on_some_of_the_ranks():
    first, middle, last = of("two_models", 3)
    assert first["equal"]
    assert last["equal"]
    assert "equal" not in middle


@pytest.mark.parametrize("case", ["all", "one", "state"])
def test_a_hook_is_registered_after_a_refusal(case):
    """With another optimizer and scaler: of the refused call nothing remains, on any rank."""
    for result in of("corrected"):
        assert result[f"{case}, refused"]["kind"] == "UsageError"
        assert result[case]["text"] == ""
        assert result[case]["observers"] == [0, 1]
        assert result[case]["equal"]


def test_states_are_gathered_without_pickle_in_the_group_of_the_hook():
    first, second = of("gathered")
    for name in ("open", "closed"):
        assert first[name] == ["rank 0 of 2", "rank 1 of 2"]
        assert second[name] == []
    assert first["alone"]["kind"] == "PeerLostError"
    assert first["alone"]["seconds"] < jobs.PROMPT


def test_zeros_of_either_sign_are_equal_means():
    for result in of("zeros"):
        assert result["text"] == ""
        assert result["lanes"] == 2
        assert result["gradient"] == [0.0] * 8


@pytest.mark.parametrize("name", ["int8", "onebit", "powersgd"])
def test_the_default_dtype_of_torch_changes_no_bit(name):
    for result in of("default_dtype"):
        assert result[name]


REFUSED = {
    "no ddp": "Net: wrap the module",
    "sparse": "sparse=True.*sparse=False",
    "double": "conv.weight is torch.float64",
    "frozen": "no parameter of the model requires a gradient",
    "last is frozen": r"dense_last: the last layer, last\.weight, last\.bias, is not trained",
    "second hook": "a communication hook",
    "same hook": "registered already: make one for each model",
    "closed": "was closed",
    "disabled scaler": "skip.*disabled.*stop",
    "mixed precision": "mixed_precision.*torch.autocast",
    "skips buckets": "skip_all_reduce_unused_params=True.*find_unused_parameters=True works",
    "steps in backward": "_apply_optimizer_in_backward.*call its step after backward",
    "state of another rank": "that of rank 2 of 2, and this is rank",
    "state of other settings": "bucket_mb: 25.0 .*, 3.0 ",
    "state of another step": "step: rank 0 0, rank 1 1",
    "state of another format": "format 99: expected 3",
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_uses_are_refused_on_every_rank(name):
    for result in of("refusals"):
        if "skipped" in result[name]:
            pytest.skip(result[name]["skipped"])
        assert result[name]["kind"] == "UsageError"
        assert re.search(REFUSED[name], result[name]["text"])
        assert result[name]["seconds"] < jobs.PROMPT


DIFFERENT = {
    "method": "compressor: rank 0 .*TernGrad.*rank {odd} .*QSGD",
    "field": r"rank 0 .*clip=2.5.*rank {odd} .*clip=2.0",
    "memory": r"memory: rank 0 .*Residual\(.*rank {odd} .*Dgc\(",
    "seed": "seed: rank 0 0.*rank {odd} 1",
    "start": "start_step: rank 0 0.*rank {odd} 1",
    "version": "gcbench: rank 0 '.*rank {odd} '9.9'",
    "code": "code of compressor: rank 0 'original'.*rank {odd} 'changed'",
    "code of memory": r"settings\. code of memory: rank 0 'original'.*rank {odd} 'changed'",
    "parameters": "parameters .digest.: rank 0 '.*load the same parameters",
    "one refuses": "no parameter of the model requires a gradient",
}


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_registered_different_settings_all_name_them(size):
    for rank, result in enumerate(of("differences", size)):
        for name, message in DIFFERENT.items():
            assert result[name]["kind"] == "UsageError"
            assert re.search(message.format(odd=size - 1), result[name]["text"])
            assert result[name]["seconds"] < jobs.PROMPT
        if rank < size - 1:
            assert f"rank {size - 1} could not register" in result["one refuses"]["text"]
            assert result["absent"]["kind"] == "PeerLostError"
            assert f"rank {size - 1} did not call register" in result["absent"]["text"]
            assert result["absent"]["seconds"] < jobs.PROMPT
        else:
            message = f"rank 0 could not register: rank {rank} did not call register"
            assert message in result["late"]["text"]
        assert result["next attempt"]["text"] == ""
        assert result["after"]["finite"]


def test_faults_in_training_are_errors_without_a_hang():
    """Backward raises torch's error class, the next forward ours."""
    first, second = of("in_training")
    for result in (first, second):
        assert result["join"]["kind"] == "UsageError"
        assert "drop_last=True" in result["join"]["text"]
        message = "rank 0: the gradient of last.bias is not finite at step 0"
        assert message in result["nan, backward"]["text"]
        assert result["nan, forward"]["kind"] == "DivergedError"
        assert "branch.bias" in result["thawed"]["text"]
        assert "sparse=False" in result["sparse later"]["text"]
        assert "find_unused_parameters=True" in result["unused"]["text"]
    assert first["alone, backward"]["kind"] == "PeerLostError"
    assert first["alone, forward"]["kind"] == "PeerLostError"
    assert "rank 1" in first["alone, forward"]["text"]
    assert "comm_hook(timeout=...)" in first["alone, forward"]["text"]
    assert first["alone, backward"]["seconds"] < jobs.PROMPT


def test_an_unsupported_backend_is_refused():
    for result in of("backends"):
        assert result["model's"]["kind"] == "UsageError"
        assert "'fake'" in result["model's"]["text"]
        assert result["model's"]["seconds"] < jobs.PROMPT


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["terngard"], {}, "Did you mean 'terngrad'"),
        (["terngrad"], {"klip": 2}, "unknown field of compressor 'terngrad': 'klip'"),
        (["topk"], {"collective": "allreduce"}, "allreduce.*Legal:"),
        (["topk"], {"collective": "tree"}, "allreduce, allgather, twoshot, ring"),
        (["topk"], {"collective": "ring"}, "error feedback.*Legal:"),
        (["topk"], {"memory": "residul"}, "Did you mean 'residual'"),
        (["topk"], {"memory_options": {"decai": 1}}, "Did you mean 'decay'"),
        (["terngrad"], {"memory": "residual"}, "--memory none"),
        (["onebit"], {"memory": "dgc"}, "masking=false"),
        (["none"], {"dense_below": -1}, "dense_below=-1"),
        (["none"], {"start_step": -1}, "start_step=-1"),
        (["none"], {"check_every": -1}, "check_every=-1"),
        (["none"], {"timeout": 0}, "timeout=0"),
        (["none"], {"timeout": math.nan}, "timeout=nan"),
        (["none"], {"timeout": math.inf}, "timeout=inf"),
    ],
)
def test_wrong_arguments_are_refused_at_once(words, options, message):
    with pytest.raises(UsageError, match=message):
        gcbench.comm_hook(*words, **options)


def test_fields_beside_a_compressor_are_refused():
    codec = gcbench.get_compressor("terngrad", clip=2.0)
    assert gcbench.comm_hook(codec).settings.compressor is codec
    with pytest.raises(UsageError, match=r"clip.*TernGrad"):
        gcbench.comm_hook(codec, clip=2.5)


# ---- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["demo", "sparseloco"])
def test_a_methods_default_memory_does_not_depend_on_who_names_it(name):
    """As in `gcbench run`: with the fields that the method sets, unless others are given."""
    default = registry.compressor_class(name).memory_options["decay"]
    for field, decay in (
        ({}, default),
        ({"memory": "residual"}, default),
        ({"memory": "residual", "memory_options": {"decay": 0.5}}, 0.5),
        ({"memory_options": {"decay": 0.5}}, 0.5),
        ({"memory": memory.FORCED}, 1.0),
    ):
        hooked = gcbench.comm_hook(name, **field)
        assert hooked.settings.memory == Residual(decay=decay)
    options = {"at_owner": False}
    hooked = gcbench.comm_hook(name, memory="residual", memory_options=options)
    assert hooked.settings.memory == Residual(decay=default, at_owner=False)


@pytest.mark.parametrize("how", [*ddp_jobs.WRONG, "sign by default", "nothing by default"])
def test_a_broken_compressor_is_named(how):
    """In every checked step, with the tensor's name; one rank warns."""
    first, second = (result[how] for result in of("checks"))
    assert [re.match(r"step \d", message)[0] for message in first["warnings"]] == [
        "step 0",
        "step 2",
    ]
    for message in first["warnings"]:
        assert "branch.weight: " in message
        assert "hidden.weight: " in message
        assert "bias" not in message, "dense tensors are as they should be"
    assert second["warnings"] == []


@pytest.mark.parametrize(
    ("name", "step"), [("module", 0), ("module, followed", 0), ("late", 2), ("other wrapper", 0)]
)
def test_steps_whose_gradients_bypass_the_hook_cause_one_warning(name, step):
    for result in of("bypassed"):
        (text,) = result[name]
        assert text.startswith("SGD made 2 steps, and no gradient passed through the hook")
        assert f"at step {step}: " in text
        assert result.get(f"{name}, closed", []) == []
        assert result["skipped"] == 4, "steps that are skipped or change nothing cause none"


@pytest.mark.parametrize("name", ["accumulated", "discarded", "two optimizers", "closure"])
def test_several_exchanges_per_step_cause_one_warning(name):
    for result in of("repeated"):
        (text,) = result[name]
        assert re.search(r"exchanges the gradient of \S+ \d times per step of (SGD|LBFGS)", text)
        for other in ("no_sync", "left out", "no memory", "two optimizers, frozen"):
            assert result[other] == [], other
        (text,) = result["every third"]
        assert re.search(r"exchanges the gradient of \S+ several times before 5 of 13 steps", text)


@pytest.mark.parametrize("name", ["retained", "other model first", "second graph", "module"])
def test_a_gradient_that_grows_after_the_exchange_causes_one_warning(name):
    first, second = of("added")
    for result in (first, second):
        (text,) = result[name]
        assert re.match(r"SGD applies a gradient of \S+ to which a backward pass added", text)
    assert first[f"{name}, end"] != second[f"{name}, end"]


def test_an_optimizer_that_steps_during_backward_is_refused():
    for result in of("added"):
        assert result["no_sync"] == result["module first"] == []
        assert result["in backward"]["kind"] == "UsageError"
        assert "Call optimizer.step() after backward" in result["in backward"]["text"]


def test_a_state_that_is_saved_before_the_optimizers_step_causes_a_warning():
    for result in of("unapplied"):
        assert result["after"] == []
        (text,) = result["before"]
        assert re.search("saved at step 3, .* applied the last exchanged gradient", text)


def test_a_state_after_a_failed_exchange_causes_a_warning():
    """The first lane had sent what its residual no longer has, and no optimizer applied it."""
    for result in of("failed_state"):
        assert result["before"] == []
        assert result["error"]["kind"] == "DivergedError"
        (text,) = result["after"]
        assert re.search("an error ended the exchange of step 1: .*saved before that step", text)


@pytest.mark.parametrize("name", ["model", "part"])
def test_a_residual_that_rests_stands_for_the_same_update(name):
    """It had been taken for one of the rate at which other parameters moved meanwhile."""
    for result in of("rested"):
        _, before, *after = result[name]
        assert before > 0
        assert after == pytest.approx([before] * 2, rel=1e-5)


def test_the_first_pass_with_static_graph_is_a_step():
    """Its buckets had been waited for without end, or had been no step."""
    for result in of("static_graph"):
        assert [result[name] for name in ("stop", "skip", "one rank")] == [[3, True]] * 3


def test_a_digest_sees_order_and_signs():
    """A sum of words is the same for both; so a wrong codec's ranks had seemed to agree."""
    x = torch.randn(4099, generator=torch.Generator().manual_seed(0))
    odd = torch.arange(4099) % 2 == 1
    others = [x.roll(2), x.roll(2042), torch.where(odd, -x, x), torch.where(~odd, -x, x), -x]
    others += [x.clone() for _ in range(3)]
    others[-1][[1, 3]] *= -1
    others[-2][[1, 2043]] *= -1
    others[-3][-1] *= -1
    digests = {digest(each) for each in [x, *others]}
    assert len(digests) == 1 + len(others)
    assert digest(x.clone()) == digest(x) == digest(torch.cat([x[:1], x])[1:])
    assert 0 <= digest(x[:0]) < 2**63


def test_a_model_that_returns_to_an_earlier_step_without_the_hook_causes_a_warning():
    for result in of("rolled_back"):
        (text,) = result.pop("model")
        assert "load_state_dict changed parameters before step 3" in text
        assert [result[name] for name in ("model, hook", "hook, model", "restored")] == [[]] * 3


def test_an_evaluation_on_one_rank_alone_is_named():
    """DDP's own collectives would not match, and gloo would end the process."""
    for result in of("evaluated_alone"):
        assert result["kind"] == "UsageError"
        assert "rank 0 'before a forward pass without gradients', rank 1 " in result["text"]
        assert "evaluate model.module" in result["text"]


def test_a_momentum_by_another_name_is_refused():
    """As in the Adafactor of Transformers."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    optimizer.param_groups[0]["beta1"] = 0.9
    with pytest.raises(UsageError, match="would both apply momentum"):
        gcbench.comm_hook("topk", memory="dgc", optimizer=optimizer)


@pytest.mark.parametrize("method", ["signsgd", "topk"])
def test_a_repeated_momentum_names_memories_that_the_method_accepts(method):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9)
    with pytest.raises(UsageError) as caught:
        gcbench.comm_hook(method, memory="momentum", optimizer=optimizer)
    named = re.findall('"([a-z0-9]+)"', str(caught.value))
    assert "none" in named
    for name in named:
        gcbench.comm_hook(method, memory=name, optimizer=optimizer)


@pytest.mark.parametrize(
    ("method", "memory", "optimizer", "message"),
    [
        ("dlion", None, {}, r"Adam would change the directions of .*hook\.optimizer\("),
        ("topk", "dgc", {}, r"Adam and the memory Dgc\(.* would both apply momentum"),
        ("topk", "momentum", {"betas": (0.0, 0.9)}, ""),
        ("topk", None, {}, ""),
    ],
)
def test_an_optimizer_that_repeats_what_the_method_does_is_refused_or_named(
    method, memory, optimizer, message
):
    adam = torch.optim.Adam([torch.nn.Parameter(torch.ones(2))], **optimizer)
    if message:
        with pytest.raises(UsageError, match=message):
            gcbench.comm_hook(method, memory=memory, optimizer=adam)
        for result in of("unsuitable"):
            (text,) = result["memory" if memory else "rule"]
            assert re.search(message, text)
            assert result["right"] == []
    else:
        gcbench.comm_hook(method, memory=memory, optimizer=adam)


def test_a_scaler_that_is_not_followed_is_named_once():
    for result in of("other_scalers"):
        (text,) = result.pop("other")
        assert "a GradScaler with the scale 8 that the hook does not follow steps SGD" in text
        del result["seconds"]
        assert [*result.values()] == [[]] * 4


def test_a_correct_compressor_causes_no_warning_and_is_recorded_by_name():
    first, second = (result["right"] for result in of("checks"))
    assert first["warnings"] == []
    assert first["records"] == second["records"]
    assert first["calls"] == 2
    names = {name for name, _ in ddp_jobs.model().named_parameters()}
    for step in (0, 2):
        assert {each["name"] for each in first["records"] if each["step"] == step} == names
    for each in first["records"]:
        dense = each["elements"] < 50
        assert each["bits"] == (32 if dense else 16)
        assert each["relative_error"] < (1e-7 if dense else 2**-11)
        assert each["cosine"] > 0.999999
    n = sum(p.numel() for p in ddp_jobs.model().parameters())
    assert first["checked"] == 2 * 4 * n, "the plain mean, at two steps"
    dense = sum(p.numel() for p in ddp_jobs.model().parameters() if p.numel() < 50)
    assert first["up"] == 3 * (2 * (n - dense) + 4 * dense)


def test_a_comparison_by_hand():
    m = torch.tensor([3.0, 4.0])
    result = check.compare(7, "w", torch.tensor([3.0, 0.0]), m, 2.0)
    assert result == check.Comparison(7, "w", 2, 0.8, 0.6, 0.5, 2.0)
    zero = torch.zeros(2)
    both = check.compare(0, "w", zero, zero, 0)
    assert (both.relative_error, both.cosine) == (0, 1)
    none = check.compare(0, "w", zero, m, 0)
    assert (none.relative_error, none.cosine, none.zeros) == (1, 0, 1)
    more = check.compare(0, "w", m, zero, 0)
    assert (more.relative_error, more.cosine) == (math.inf, 0)


def test_bounds_follow_the_claims_of_a_method_and_reject_nan():
    contracting = check.Bounds.of(gcbench.get_compressor("topk"), None)
    assert contracting == check.Bounds(1.5)
    assert check.Bounds.of(gcbench.get_compressor("randomk"), None).error == math.inf
    assert check.Bounds.of(gcbench.get_compressor("topk"), 0.1).error == 0.1
    together = check.Bounds.of(gcbench.get_compressor("topk"), None, "sparse")
    assert together == check.Bounds(1.5, 0.0, empty=True)
    nothing = check.Comparison(0, "w", 1000, 1.0, 0.0, 1.0, 1.0)
    assert (together.judge(nothing), contracting.judge(nothing) == "") == ("", False)
    assert together.judge(check.Comparison(0, "w", 1000, 1.0, 0.0, 0.99, 1.0))
    vote = check.Bounds.of(gcbench.get_compressor("signsgd"), None)
    assert vote == check.Bounds(math.inf, -0.5)
    assert vote.judge(check.Comparison(0, "w", 1000, 300.0, -0.1, 0.0, 1.0)) == ""
    assert "cosine -0.9" in vote.judge(check.Comparison(0, "w", 1000, 300.0, -0.9, 0.0, 1.0))
    wrong = check.Comparison(0, "w", 1000, math.nan, math.nan, 0.0, 1.0)
    assert "relative error nan" in contracting.judge(wrong)
    assert "cosine nan" in contracting.judge(wrong)
    zero = check.Comparison(0, "w", 1000, math.inf, 0.0, 0.0, 1.0)
    assert vote.judge(zero) == "", "nothing points anywhere"
    assert "relative error inf" in contracting.judge(zero)
    assert contracting.judge(check.Comparison(0, "w", 255, 9.0, -1.0, 0.0, 1.0)) == ""
    assert contracting.judge(check.Comparison(0, "w", 1000, 0.0, 1.0, 1.0, 1.0)) == ""


# ---- nothing goes wrong silently -----------------------------------------------------------------


def test_residuals_follow_the_applied_rate():
    for result in of("rates"):
        assert result["set after backward"], "the first rate rescales nothing"
        assert result["optimizer"], "the same bits as a rate that is set before each backward"
        for now in ((1e-3, 1e-3), (5e-4, 1e-3), (0.0, 4e-3)):
            assert result[f"groups {now}"], "the rate of the step before is still the one read"
        assert result["each group its own"], (
            "1e-3, 5e-4, 0 -> 2.5e-4: 2; 1e-3, 1e-3, 4e-3 -> 1e-3: 4"
        )
        assert result["carried"]


def test_invalid_rates_are_refused():
    for result in of("rates"):
        assert result["set beside"]["kind"] == "UsageError"
        assert "lr=0.1 with optimizer=" in result["set beside"]["text"]
        assert result["another model's"]["kind"] == "UsageError"
        assert result["ranks differ"]["kind"] == "UsageError"
        assert "hook.lr: rank 0 0.1, rank 1 0.2" in result["ranks differ"]["text"]
        assert result["ranks differ"]["seconds"] < jobs.PROMPT


def test_a_large_residual_causes_one_warning_and_a_normal_one_none():
    """Top-k at a steady rate; and a rate that falls by a thousand."""
    for result in of("rates"):
        healthy, fell = result["warnings"]
        assert healthy == []
        assert len(fell) == 1
        assert re.match(r"the residual of [a-z.]+ has a norm of", fell[0])


def test_a_non_finite_gradient_stops_all_ranks_at_once_or_is_skipped_on_all():
    for result in of("nonfinite"):
        assert "rank 1: the gradient of conv.weight" in result["stop"]["text"]
        assert result["stop"]["seconds"] < jobs.PROMPT
        assert result["stop, forward"]["kind"] == "DivergedError"
        assert result["skip"]["kind"] == result["skip, forward"]["kind"] == ""
        assert result["all are nan"]
        assert result["untouched"], "residuals and bytes of gradients"
        assert result["counted"] == [3, 1]


@pytest.mark.parametrize("kind", ddp_jobs.by_scale())
def test_a_loss_scale_changes_nothing(kind):
    """Powers of two: bit for bit the parameters of a job without a scaler, also after a resume."""
    for result in of("loss_scales"):
        assert result[kind]["moved"] > 1e-3
        assert all(result[kind]["equal"].values()), result[kind]["equal"]
        assert len(result[kind]["equal"]) == 1 + (kind in ddp_jobs.RESUMED)


def test_a_grad_scaler_skips_as_in_plain_ddp_and_residuals_are_without_its_scale():
    for result in of("nonfinite"):
        plain, none, ours = result["scales"]
        assert plain == none == ours
        assert plain[3] > plain[4], "the overflow of rank 1 was skipped on both"
        assert result["finite"] == [True] * 3
        assert result["none"] == 0
        assert result["skipped, untouched"]
        assert all(result["unscaled"])


def test_a_mean_that_overflows_float16_is_an_error_on_every_rank():
    for result in of("nonfinite"):
        assert result["overflow, forward"]["kind"] == "DivergedError"
        assert re.search(r"weight that randomk.*float16", result["overflow, forward"]["text"])


BAD = {
    "shape": r"residual.*shape \(1,\)",
    "dtype": "int8",
    "nan": "not finite",
    "missing": "residual",
    "rate": "-1.0",
    "traffic": "-1.0",
    "step -5": "step=-5",
    "step 2^70": f"step={2**70}",
    "step True": "step=True",
    "flipped": "digest",
    "header": "digest",
    "text": "format None",
    "empty": "rank 0 of [23]",
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_state_is_refused_with_the_invalid_value(name):
    for result in of("states"):
        assert result["refused"][name]["kind"] == "UsageError"
        assert re.search(BAD[name], result["refused"][name]["text"])
        assert result["unchanged"]


def test_a_state_may_be_loaded_after_register_on_all_ranks():
    for result in of("states"):
        assert result["step"] == 3
        assert result["continues"], "in the bits of the job that was not interrupted"
        assert result["alone"]["kind"] == "UsageError"
        assert re.search("states loaded.*rank 0 2, rank 1 1", result["alone"]["text"])


@pytest.mark.parametrize("name", ["onebit", "powersgd", "topk"])
def test_a_distributed_checkpoint_gives_each_rank_its_own_state(name):
    for rank, result in enumerate(of("states")):
        assert result[f"dcp {name}"] == [True, 3, rank]


def test_another_world_size_is_refused_or_preserves_the_mean_of_residuals():
    for result in of("resized", 3)[::2]:
        assert result["refused"]["kind"] == "UsageError"
        assert "rank 0 of 3" in result["refused"]["text"]
        assert result["one is missing"]["kind"] == "UsageError"
        for name in ("residuals", "owners", "carried"):
            assert result[name] == [True, True]
        assert (result["step"], result["trains on"]) == (3, 5)


def test_bytes_of_a_rank_that_joins_a_job_count_from_then_on():
    """Of one rank alone nothing counts. The checks send each element once, in fp32."""
    for result in of("grown", 3):
        assert result["1"] == result["1 resumed"] == result["2"] == result["2 resumed"] < 0.1
        assert all(value == 1 for name, value in result.items() if name.endswith("checked"))


@pytest.mark.parametrize("how", ["copy", "file"])
def test_a_copy_of_the_model_has_no_hook(how):
    for result in of("copies"):
        assert result["averaged"]
        assert result[f"{how}, evaluated"]
        assert result[how], "plain DDP's gradients"
        assert len(result[f"{how}, warned"]) == 1
        assert result[f"{how}, hooked again"] == 1


def test_a_hook_cannot_be_called_or_copied():
    for result in of("copies"):
        for name in ("deepcopy", "pickle", "direct"):
            assert result[name]["kind"] == "UsageError"
        assert "gcbench.comm_hook(...).register(model)" in result["direct"]["text"]
        assert "state_dict" in result["pickle"]["text"]


def test_a_model_is_evaluated_after_close_but_not_trained():
    for result in of("copies"):
        assert result["after close"] == result["after close, no grad"] == ""
        assert result["trained after close"]["kind"] == "UsageError"


def test_forbidden_calls_in_on_check_are_refused_at_once():
    first, second = of("lives")
    for result in (first, second):
        for name in ("state_dict", "close"):
            assert result[name]["kind"] == "UsageError"
            assert f"on_check called {name}" in result[name]["text"]
            assert result[f"{name}, backward"]["seconds"] < jobs.PROMPT
        assert result["model"]["kind"] == "", "an evaluation waits for nothing"
    assert second["one rank, forward"]["kind"] == "ZeroDivisionError"
    assert first["one rank, forward"]["kind"] == "PeerLostError"
    assert "rank 1 failed: ZeroDivisionError" in first["one rank, forward"]["text"]
    assert first["one rank"]["seconds"] < jobs.PROMPT


def test_changes_behind_the_hook_are_noticed():
    for result in of("lives"):
        assert result["threads"] == [1, 0], "the thread ends with the hook"
        assert result["python reducer"]["kind"] == "UsageError"
        assert len(result["unfrozen"]) == 1
        assert "branch.weight" in result["unfrozen"][0]
        for name, parameter in (("add", "extra"), ("assign", "weight"), ("parametrize", "branch")):
            (text,) = result[name]
            assert re.match(rf"\S*{parameter}.* when the hook was registered, and does now", text)


def test_fields_change_by_step_as_in_a_run():
    for result in of("lives"):
        assert result["schedule"]
        assert result["stages"] == [0.25, 0.01]


@pytest.mark.parametrize("make", [gcbench.comm_hook, gcbench.shard_hook])
@pytest.mark.parametrize("name", ["ratio", "step", "settings", "records", "l", "optimizer"])
def test_unknown_and_read_only_attributes_are_refused(make, name):
    hook = make("topk")
    with pytest.raises(UsageError, match=f"{name} = 0.01"):
        setattr(hook, name, 0.01)
    with pytest.raises(AttributeError):
        setattr(hook, name, 0.01)


@pytest.mark.parametrize("make", [gcbench.comm_hook, gcbench.shard_hook])
def test_only_an_enabled_scaler_skips_steps(make):
    scalers = [torch.amp.GradScaler("cpu", enabled=enabled) for enabled in (True, False)]
    policies = [make("onebit", scaler=each).settings.on_nonfinite for each in (*scalers, None)]
    assert policies == ["skip", "stop", "stop"]
    assert make("onebit", scaler=scalers[1], on_nonfinite="stop").settings.on_nonfinite == "stop"
    with pytest.raises(UsageError, match="disabled"):
        make("onebit", scaler=scalers[1], on_nonfinite="skip")


def test_with_a_disabled_scaler_nan_reaches_no_parameter():
    for result in of("nonfinite"):
        assert result["disabled"]["kind"] == "DivergedError"
        assert result["disabled, unchanged"]


@pytest.mark.parametrize("make", [gcbench.comm_hook, gcbench.shard_hook])
@pytest.mark.parametrize(
    "wrong",
    [
        {"seed": "a"},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": True},
        {"dense_below": 1.5},
        {"dense_below": None},
        {"start_step": 1e3},
        {"memory": 3},
        {"memory_options": "decay"},
        {"on_nonfinite": "raise"},
        {"on_resize": True},
        {"optimizer": 0.1},
        {"optimizer": []},
        {"scaler": 1024},
        {"compressor": 7},
        {"ratio": "0:0.5/0:0.1"},
        {"ratio": "1:0.5"},
    ],
)
def test_arguments_of_another_type_are_refused_in_the_call(make, wrong):
    with pytest.raises(UsageError, match=re.escape(next(iter(wrong)))):
        make(**{"compressor": "topk", **wrong})


@pytest.mark.parametrize("memory", [None, "dion"])
def test_a_schedule_of_a_field_of_the_memory_is_refused(memory):
    with pytest.raises(UsageError, match=r"mu changes from 0\.9 to 0\.5"):
        scheme.Scheme.of("dion", {"mu": "0:0.9/9:0.5"}, memory, None)
    steady = scheme.Scheme.of("dion", {"mu": 0.5, "rank_fraction": "0:0.5/9:1"}, memory, None)
    assert steady.memory.mu == 0.5


def test_schedules_have_the_constants_of_the_command_line():
    fft = scheme.stages("fft", {"low": "0:null/9:-0.3", "high": "0:null/9:0.3", "half": "0:true"})
    assert [(each.low, each.high, each.half) for each in fft.values()] == [
        (None, None, True),
        (-0.3, 0.3, True),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        {"dense_last": 1},
        {"check_every": True},
        {"check_every": 0.5},
        {"check_error": "1"},
        {"on_check": 1},
        {"bucket_mb": "25"},
        {"timeout": True},
        {"collective": 1},
    ],
)
def test_arguments_of_the_hook_for_ddp_are_refused_in_the_call(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        gcbench.comm_hook("topk", **wrong)


def test_records_are_bounded():
    hook = gcbench.comm_hook("none")
    hook._records.extend([check.Comparison(i, "w", 1, 0, 1, 0, 32) for i in range(20_000)])
    assert len(hook.records) == RECORDS == 10_000
    assert [each.step for each in hook.records[-2:]] == [19_998, 19_999]


# ---- pieces --------------------------------------------------------------------------------------


def test_tensors_are_assigned_to_lanes_in_reverse_order():
    names, shapes = ["a", "b", "c", "d"], [(100,), (5,), (10, 6), (50,)]
    plan = Plan.of(names, shapes, [False, True, False, False], 60)
    assert [[placed.name for placed in lane] for lane in plan.lanes] == [["d", "c"], ["a"], ["b"]]
    assert plan.dense == (False, False, True)
    assert [placed.start for placed in plan.tensors] == [0, 50, 110, 210]
    assert [placed.lane for placed in plan.tensors] == [0, 0, 1, 2]
    assert plan.stretch(0) == slice(0, 110)
    assert plan.stretch(2) == slice(210, 215)
    flat = torch.arange(215.0)
    assert torch.equal(plan.tensors[1].of(flat), flat[50:110].view(10, 6))
    one = Plan.of(names, shapes, [False] * 4, math.inf)
    assert len(one.lanes) == 1
    each = Plan.of(names, shapes, [False] * 4, 0)
    assert [len(lane) for lane in each.lanes] == [1, 1, 1, 1]


def test_an_owner_has_the_residual_of_its_shard(simulated):
    """A tensor may have a part of it in a shard, all of it, or nothing."""
    plan = Plan.of(["a", "b", "c"], [(1000,), (1500,), (500,)], [False] * 3, math.inf)
    onebit = gcbench.get_compressor("onebit")
    lane = Lane(onebit, "twoshot", 0, Segments.of([(500,), (1500,), (1000,)]), Residual())
    world = simulated(2)
    exchange = Exchange(world, [lane], 0, Clock(torch.device("cpu")))
    bounds = shard_bounds(3000, 2)
    assert bounds == [0, 2048, 3000]
    for rank, sizes in ((0, [500, 1500, 48]), (1, [None, None, 952])):
        world.ranks = range(rank, rank + 1)
        owned = torch.arange(float(bounds[rank]), float(bounds[rank + 1]))
        exchange.workers[0][0]["owner"] = owned
        result = [plans.state_views(exchange, plan, placed).get("owner") for placed in plan.tensors]
        assert [None if each is None else each.numel() for each in result] == sizes
        for placed, each in zip(plan.tensors, result, strict=True):
            if each is not None:
                assert each[0] == max(placed.start, bounds[rank])
    world.ranks = range(2)


def test_a_state_set_aside_is_not_sent_and_is_restored(simulated):
    """It is zero during the exchange; an owner's residual created meanwhile becomes zero."""
    plan = Plan.of(["a", "b"], [(300,), (700,)], [False] * 2, math.inf)
    method = gcbench.get_compressor("onebit")
    lane = Lane(method, "twoshot", 0, Segments.of([(700,), (300,)]), Residual())
    exchange = Exchange(simulated(1), [lane], 0, Clock(torch.device("cpu")))
    residual = exchange.workers[0][0]["residual"]
    residual.fill_(2.0)
    idle, used = plan.tensors
    with plans.set_aside(exchange, plan, [idle]):
        assert not idle.of(residual).any()
        assert used.of(residual).all()
        exchange.workers[0][0]["owner"] = torch.full((1000,), 3.0)
        residual.fill_(5.0)
    assert torch.equal(idle.of(residual), torch.full((700,), 2.0))
    assert torch.equal(used.of(residual), torch.full((300,), 5.0))
    owner = exchange.workers[0][0]["owner"]
    assert not idle.of(owner).any()
    assert torch.equal(used.of(owner), torch.full((300,), 3.0))


def test_a_range_of_a_bucket_is_viewed_in_the_parameters_strides():
    part = torch.arange(24.0)
    for parameter in (
        torch.empty(2, 3, 4),
        torch.empty(4, 2, 3).permute(1, 2, 0),
        torch.empty(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        torch.empty(4, 3, 2).transpose(0, 1),
        torch.empty(24),
    ):
        there = _strided(part, parameter)
        assert there.shape == parameter.shape
        assert there.stride() == parameter.stride()
    gaps = torch.empty(4, 12)[:, ::2]
    assert torch.equal(_strided(part, gaps), part.view(4, 6))
    assert _strided(part[:1], torch.empty(())).shape == ()


def test_the_thread_runs_calls_in_order_also_after_an_error():
    worker, seen, gate = Worker("test"), [], threading.Event()
    worker.submit(gate.wait)
    futures = [worker.submit(lambda i=i: seen.append(i)) for i in range(20)]
    wrong = worker.submit(lambda: 1 / 0)
    last = worker.submit(lambda: "done")
    assert seen == []
    gate.set()
    assert last.result(10) == "done"
    assert seen == [*range(20)]
    assert all(future.done() for future in futures)
    with pytest.raises(ZeroDivisionError):
        wrong.result(10)
    worker.close(10)


def test_a_placed_scalar_is_one_element():
    placed = Placed("s", (), 0, 3)
    assert placed.numel == 1
    assert placed.of(torch.arange(5.0)) == 3
