"""The adapters for Lightning, Accelerate and Transformers, in jobs of the real packages.

The jobs of two processes are in framework_jobs.py; one start of the processes does them all.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import framework_jobs
import jobs
import pytest
from framework_jobs import INSTALLED

from gcbench.integrations import agreement, frameworks
from gcbench.integrations.hook import key_of

pytestmark = pytest.mark.usefixtures("forked")

JOBS = jobs.Jobs(
    "framework_jobs",
    [],
    {2: [name for name in framework_jobs.JOBS if {*framework_jobs.needs(name)} <= {*INSTALLED}]},
    [{"lightning": "lightning.pytorch"}.get(name, name) for name in INSTALLED],
)


def of(name: str) -> list[dict]:
    """Return each rank's result of a job; skip the test where its packages are not installed."""
    missing = [package for package in framework_jobs.needs(name) if package not in INSTALLED]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return JOBS.of(name)


ALL = ["lightning", "accelerate", "transformers"]
STEPS = 2 * framework_jobs.EPOCH


# ---- equal to a hook that is registered by hand --------------------------------------------------


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_a_job_ends_in_the_bits_of_plain_ddp_with_a_hook_that_is_given_each_rate(name):
    (expected, _), results = JOBS.of("reference"), of(name)
    assert len({expected["onebit"]["end"], expected["rate 1"], expected["none"]}) == 3
    for result in results:
        assert result["end"] == expected["onebit"]["end"]
        assert (result["steps"], result["sent"]) == (STEPS, expected["onebit"]["sent"])


def test_a_transformers_job_ends_in_the_bits_of_a_hook_that_is_registered_by_hand():
    for result in of("transformers"):
        assert result["end"] == result["by hand"]
        assert len({result["end"][0], result["rate 1"], result["none"]}) == 3


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_accumulated_gradients_are_exchanged_once_per_optimizer_step(name):
    expected = JOBS.of("reference")[0]["accumulated"]
    for result in of(name):
        assert result["accumulated"] == {key: expected[key] for key in ("end", "steps")}


def test_transformers_accumulates():
    for result in of("transformers"):
        assert result["accumulated steps"] == 6


def test_residuals_follow_the_rates_of_several_optimizers():
    for result in of("lightning_two"):
        assert result["end"] == result["by hand"] != result["rate 1"]
        assert result["steps"] == STEPS


# ---- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_job_ends_in_the_bits_of_an_uninterrupted_one(name):
    for result in of(name):
        if name == "transformers":
            assert result["resumed"] == result["end"][:2]
        else:
            assert (result["resumed"], result["resumed steps"]) == (result["end"], STEPS)


def test_a_second_fit_begins_with_the_residuals_of_the_first():
    """Lightning makes new optimizers for it. A checkpoint saved after `fit` has them, too."""
    expected = JOBS.of("reference")[0]
    for result in of("lightning"):
        assert result["second fit"] == expected["renewed"]
        assert result["after fit"] == expected["longer"]
        assert result["closed"]
        assert result["validated"] == 1


def test_a_second_train_goes_on_with_the_hook_of_the_first():
    for result in of("transformers"):
        assert result["again"] == result["end"][:2], "back to step 3, with its residuals"
        assert result["second train"] == [result["longer"], True, 9]


def test_a_checkpoint_has_the_states_of_all_ranks():
    assert of("lightning_states")[0]["ranks"] == ["rank 0 of 2", "rank 1 of 2"]
    for result in of("accelerate"):
        assert result["files"] == ["gcbench_0_rank0.pt", "gcbench_0_rank1.pt"]
    for result in of("accelerate_states"):
        assert result["loaded"], "two models of one job: each has its own files"
    for result in of("transformers"):
        assert result["files"] == ["gcbench_rank0.pt", "gcbench_rank1.pt"]
        assert result["weights"] == []


@pytest.mark.parametrize("name", ["lightning_states", "accelerate_states", "transformers"])
def test_a_checkpoint_without_a_state_is_warned_about_once(name):
    first, second = of(name)
    texts = [each["without"] for each in (first, second)]
    if name != "accelerate_states":
        assert {each["steps"] for each in texts} == {framework_jobs.EPOCH if "light" in name else 3}
        texts = [each["warned"] for each in texts]
    assert [len(each) for each in texts] == [1, 0]


def test_a_smaller_job_replaces_the_states_of_a_larger_one(tmp_path, monkeypatch):
    """Three ranks and then two save in the same folder, and each of three ranks loads from it."""

    def become(rank: int, size: int) -> None:
        monkeypatch.setattr(frameworks.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(frameworks.dist, "get_world_size", lambda: size)

    for size in (3, 2):
        for rank in range(size):
            become(rank, size)
            hook = SimpleNamespace(state_dict={key_of(rank, size): {}}.copy)
            frameworks.save(hook, tmp_path, "gcbench")
    for rank in range(3):
        become(rank, 3)
        assert {*frameworks.load(tmp_path, "gcbench")} == {"rank 0 of 2", "rank 1 of 2"}


def test_states_of_another_job_are_refused_with_their_rank():
    for rank, result in enumerate(of("lightning_states")):
        assert "rank 0 of 1" in result["one rank"]
        assert f"rank {rank} of 2" in result["one rank"]
    assert "rank 1 of 2" in of("accelerate_states")[1]["one rank"]
    for result in of("transformers"):
        assert "rank 1 of 2" in result["one rank"]


def test_after_an_exception_lightning_saves_no_state_and_the_hook_is_closed():
    for result in of("lightning_states"):
        assert result["on exception"] == []
        assert result["closed"]


def test_a_search_for_a_rate_leaves_no_trace():
    """A LearningRateFinder trains within `fit` before the hook is registered."""
    for result in of("lightning_states"):
        assert result["after the search"] == result["without a search"]
        assert result["after the search"][0] == STEPS


def test_a_second_accelerate_hook_replaces_the_closed_one():
    """In checkpoints and logs: the file of the first hook would be loaded into the second."""
    for rank, result in enumerate(of("accelerate_again")):
        assert result["files"] == ["gcbench_0_rank0.pt", "gcbench_0_rank1.pt"]
        assert (result["load"], result["equal"], result["steps"]) == ("", True, 3)
        assert result["rows"] == ([] if rank else [2, 4, 2])


def test_compress_after_the_optimizer_has_made_steps_is_warned_about():
    """Also after the load of an optimizer without a state, such as SGD without momentum."""
    for result in of("accelerate_states"):
        for name in ("late", "loaded first"):
            (text,) = result[name]
            assert "load_state" in text
        assert result["new"] == []


# ---- loggers -------------------------------------------------------------------------------------


def check_row(
    row: dict, step: int, reference: dict, prefix: str = "", once: int = agreement.BYTES
) -> None:
    """Compare the values of a row, logged after this exchange (from 1), with those of a hook.

    `once`: bytes of the agreement before DDP rebuilds its buckets, in the second forward pass.
    """
    done = step / reference["steps"]
    sent, fp32 = done * (reference["sent"] - once) + once * (step > 1), done * reference["fp32"]
    assert float(row["gcbench/sent_bytes"]) == sent
    assert float(row["gcbench/fp32_bytes"]) == fp32
    bits = 32 * sent / fp32
    assert math.isclose(float(row["gcbench/bits_per_element"]), bits)
    records = [each for each in reference["records"] if each[0] == step - 1]
    errors = {f"gcbench/relative_error/{prefix}{name}": error for _, name, error, _ in records}
    cosines = {f"gcbench/cosine/{prefix}{name}": cosine for _, name, _, cosine in records}
    expected = errors | cosines
    if records:
        expected["gcbench/max_relative_error"] = max(errors.values())
        expected["gcbench/min_cosine"] = min(cosines.values())
    logged = {key: float(value) for key, value in row.items() if "gcbench" in key and value != ""}
    for name in ("sent_bytes", "fp32_bytes", "bits_per_element"):
        del logged[f"gcbench/{name}"]
    assert logged == expected


def test_lightnings_logger_gets_bytes_at_its_interval_and_comparisons_at_each_check():
    reference = JOBS.of("reference")[0]["onebit"]
    rows = of("lightning")[0]["rows"]
    assert [int(row["step"]) for row in rows] == [0, 3, 6, 7], "every 4 steps, and checks of 3"
    for row in rows:
        check_row(row, int(row["step"]) + 1, reference, "net.")


def test_lightning_logs_once_per_step_where_gradients_are_accumulated():
    rows = of("lightning")[0]["accumulated rows"]
    assert [int(row["step"]) for row in rows] == [0, 1, 2, 3]


def test_accelerates_tracker_gets_bytes_at_its_interval_and_comparisons_at_each_check():
    reference = JOBS.of("reference")[0]["onebit"]
    first, second = of("accelerate")
    assert [step for step, _ in first["rows"]] == [1, 4, 7, 8]
    for step, row in first["rows"]:
        check_row(row, step, reference)
    assert second["rows"] == [], "the main process logs"


def test_reporters_of_transformers_get_bytes_and_comparisons_with_the_loss():
    result = of("transformers")[0]
    _, steps, sent, fp32 = result["end"]
    reference = {"steps": steps, "sent": sent, "fp32": fp32, "records": result["records"]}
    rows = [[step, row] for step, row in result["rows"] if "loss" in row][:4]
    assert [step for step, _ in rows] == [1, 2, 4, 6], "every 2 steps, and checks of 3"
    for step, row in rows:
        check_row(row, step, reference, once=0)  # Trainer looks for unused parameters
    others = [row for _, row in result["rows"] if "loss" not in row]
    assert others, "what the Trainer logs at the end"
    assert not any("gcbench" in key for row in others for key in row)
    history = [row for row in result["history"] if "loss" in row]
    assert [{**row, "step": step} for step, row in rows] == history[:4]


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "single": ["SingleDeviceStrategy", 'strategy="ddp"'],
        "fsdp": ["FSDPStrategy", "gcbench.shard_hook"],
        "fsdp2": ["ModelParallelStrategy", "gcbench.shard_hook"],
        "deepspeed": ["DeepSpeedStrategy", 'strategy="ddp"'],
        "option": ["nothing"],
        "optimizer": ["optimizer"],
        "hook": ["fit"],
    }.items(),
)
def test_lightning_is_refused_what_cannot_work(case, words):
    for result in of("lightning_refusals"):
        assert [word for word in words if word not in result[case]] == []


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "NO": ["torchrun"],
        "FSDP": ["gcbench.shard_hook"],
        "DEEPSPEED": ["DeepSpeed"],
        "MEGATRON_LM": ["Megatron"],
        "not prepared": ["Sequential", "accelerator.prepare"],
        "no optimizer": ["optimizer=None", "accelerator.prepare"],
        "option": ["nothing"],
        "log_every": ["log_every=-1"],
    }.items(),
)
def test_accelerate_is_refused_what_cannot_work(case, words):
    for result in of("accelerate_refusals"):
        assert [word for word in words if word not in result[case]] == []


@pytest.mark.parametrize(
    ("case", "words"),
    {
        "option": ["nothing"],
        "optimizer": ["optimizer"],
        "hook": ["train"],
        "called": ["callbacks=[Compression(...)]"],
    }.items(),
)
def test_transformers_is_refused_what_cannot_work(case, words):
    for result in of("transformers_refusals"):
        assert [word for word in words if word not in result[case]] == []


# ---- hooks without register ---------------------------------------------------------------------


def test_a_ddp_model_does_not_train_while_a_hook_waits_to_be_registered():
    for result in JOBS.of("unregistered"):
        for case in ("made", "again", "closed, and a second"):
            assert "hook.register(model)" in result[case]
            assert "framework_jobs.py:" in result[case], "where the hook was made"
        for case in (
            "before",
            "no gradient",
            "evaluation",
            "not wrapped",
            "deleted",
            "not for DDP",
        ):
            assert result[case] == ""
        assert result["registered"] == ["", ""]
        assert result["another waits"][0]
        assert result["another waits"][1] == "", "the model that has its hook"
        assert result["watched"] == 0


def test_a_hook_that_a_framework_drops_is_an_error():
    for result in of("lightning_argument"):
        assert "gcbench.integrations.lightning" in result["hook"]
        assert "gcbench.integrations.lightning" in result["state"]
        assert result["none"] == ""
    for result in of("accelerate_argument"):
        assert "gcbench" in result["hook"]
        assert result["none"] == ""


# ---- the guide -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_the_example_of_the_guide_trains_and_saves(name):
    of(f"{name}_refusals")  # skips
    for result in JOBS.of("guide"):
        example = result[name]
        assert example["file"]
        assert example["steps"] == (6 if name == "transformers" else framework_jobs.EPOCH)
        assert 0 < example["sent"] < 0.5 * example["fp32"]
