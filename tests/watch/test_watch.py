"""`gcbench watch` on jobs with and without a hook, and on jobs misconfigured on purpose."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from commands import invoke

from gcbench import watch

JOB = Path(__file__).with_name("job.py")
PARAMETERS = 64 * 512 + 512 + 512 * 10 + 10
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def document(done) -> dict:
    """Return what --json printed, also if a check failed."""
    assert done.code in (0, 1), done.err
    return json.loads(done.out)


@pytest.fixture
def python(programs):
    """A Python that has imported torch already; the recorder is attached by the job itself."""
    return [programs.folder / "python"]


def recorder():
    """Return the module that the job imports."""
    sys.path.insert(0, str(watch.SITE))
    try:
        return importlib.import_module("gcbench_recorder")
    finally:
        sys.path.remove(str(watch.SITE))


def record(rank: int, sent: float = 0.0, steps: int = 2, **others: object) -> dict:
    """Return a record of a rank that sends these bytes per step."""
    rows = [["send", "float32", 2, 1, sent, sent * (steps - 1), 0.0, 0]]
    snapshots = {"start": {"totals": []}, "end": {"totals": rows}}
    return {"rank": rank, "steps": steps, "failures": {}, **snapshots, **others}


def watched(kind: str, *flags: object, launcher: Sequence[object]):
    """Return the result of the command, and its rows by (collective, dtype)."""
    done = invoke("watch", "--check-every", 2, *flags, "--json", "--", *launcher, JOB, kind)
    rows = {}
    if done.code in (0, 1) and done.out:
        rows = {
            (row["collective"], row["dtype"]): row for row in document(done)["tables"][0]["rows"]
        }
    return done, rows


def test_a_plain_ddp_job():
    done, rows = watched("plain", "--expect", f"fp32/{4 * PARAMETERS}", launcher=TORCHRUN)
    assert done.code == 0, done.err
    row = rows["all_reduce", "float32"]
    assert (row["ranks"], row["calls"]) == (2, 1)
    assert row["bytes"] == row["sent"] == 4 * PARAMETERS
    assert row["seconds"] > 0
    assert row["share"] > 0
    assert "plain done" not in done.out


def test_the_time_of_a_call_counts_in_its_step():
    """It is known late: that of the first step after the second, that of the last at the end."""
    totals = recorder().Totals()
    key = ("all_reduce", "float32", 2)
    takes = [5.0, 1.0, 2.0, 3.0, 9.0]
    calls, snapshots = [], []
    for _ in takes[:-1]:
        calls.append(totals.called(key, 400.0))
        snapshots.append(totals.snapshot())
    calls.append(totals.called(key, 400.0))  # after the last step
    for number in (1, 0, 2, 4, 3):
        calls[number](takes[number])
    assert totals.now() == {key: [5.0, 2000.0, 2000.0, 20.0, 5.0]}
    ends = [
        {"time": time, "totals": [[*key, *row] for row in rows.values()]}
        for time, rows in ((0.0, snapshots[0]), (30.0, snapshots[-1]))
    ]
    rows, seconds = watch.table_rows([{"steps": 4, "start": ends[0], "end": ends[1]}])
    assert seconds == 10.0
    (row,) = rows
    assert (row["calls"], row["bytes"], row["seconds"], row["share"]) == (1, 400.0, 2.0, 0.2)


def test_a_job_with_torchs_hook_and_another_expectation(python):
    done, rows = watched("fp16", "--expect", "bf16", launcher=python)
    assert done.code == 1
    assert rows["all_reduce", "float16"]["bytes"] == 2 * PARAMETERS
    (fault,) = [line for line in document(done)["answer"] if line.startswith("UNEXPECTED DTYPE")]
    assert "bfloat16" in fault
    assert "100 % float16" in fault


@pytest.mark.parametrize("kind", ["int8", "ring"])
def test_a_job_with_our_hook(kind, python):
    """By ring it also compares its mean with a plain one at every second step, in fp32."""
    flags = ("--expect", f"uint8/{1.02 * PARAMETERS:.0f}") if kind == "int8" else ()
    done, rows = watched(kind, *flags, launcher=python)
    assert done.code == 0, document(done)["answer"]
    codes = sum(row["sent"] for (_, dtype), row in rows.items() if dtype == "uint8")
    assert PARAMETERS < codes < 1.03 * PARAMETERS
    assert rows["send", "uint8"]["sent"] == codes  # gloo sends them from worker to worker
    assert rows["send", "uint8"]["seconds"] is None
    assert "`send` of unknown time" in document(done)["answer"][0]


def test_two_hooks_are_compared_separately(python):
    """Ranks call the collectives of the two in another order."""
    done, _ = watched("two hooks", launcher=python)
    assert done.code == 0, document(done)["answer"]


def test_ranks_may_differ_within_a_round_of_local_steps(python):
    """They are compared after step 6, the end of a round, and at the end of the job."""
    done, _ = watched("local", launcher=python)
    assert done.code == 0, document(done)["answer"]
    done, _ = watched("local differ", launcher=python)
    (fault,) = [line for line in document(done)["answer"] if line.startswith("RANKS DIFFER")]
    assert "parameters at the end: ranks [1]" in fault


def test_parameters_that_change_after_the_last_step_are_those_of_the_end(python):
    """Such as a checkpoint that one rank loads: no step made the ranks differ."""
    done, _ = watched("loads", launcher=python)
    assert done.code == 1
    (fault,) = [line for line in document(done)["answer"] if line.startswith("RANKS DIFFER")]
    assert "parameters at the end: ranks [1]" in fault
    assert "after its last step (7)" in fault


def test_sparse_gradients_are_counted_and_compared(python):
    """A rank sends 3 and the other 4 rows of 512 floats, each with an index of 8 bytes."""
    done, rows = watched("sparse", launcher=python)
    assert done.code == 0, done.err
    row = rows["sparse all_reduce", "float32"]
    assert row["calls"] == 1
    assert row["bytes"] == row["sent"] == 3.5 * (4 * 512 + 8)
    assert not any("Not recorded" in line for line in document(done)["answer"])


def test_what_cannot_be_digested_is_reported_and_ends_no_job(python):
    done, _ = watched("unusual", launcher=python)
    assert done.code == 0, done.err
    (line,) = [line for line in document(done)["answer"] if line.startswith("Not recorded")]
    assert "all_reduce" in line


def test_bytes_per_step_need_two_steps(python):
    """The bytes of a whole job are not those of a step, and its collectives have no share."""
    done, rows = watched("one step", "--expect", f"fp32/{4 * PARAMETERS}", launcher=python)
    assert rows["all_reduce", "float32"]["sent"] == 4 * PARAMETERS
    answer = document(done)["answer"]
    assert done.code == 1
    (fault,) = [line for line in answer if "BYTES" in line]
    assert fault.startswith("CANNOT CHECK BYTES")
    assert "%" not in answer[0]
    settings = watch.Settings(command=["job"], expect="fp32")
    assert watch.unexpected(settings, [*rows.values()], [record(0, steps=1)]) == []


def test_an_optimizer_that_splits_its_work_between_ranks(python):
    """Parameters are compared after its step, not after that of the optimizer inside it."""
    done, rows = watched("zero", launcher=python)
    assert done.code == 0, document(done)["answer"]
    assert rows["broadcast", "float32"]["sent"] == 4 * PARAMETERS / 2


def test_a_step_that_calls_the_step_of_its_base_class_counts_once(python):
    done, rows = watched("subclass", "--expect", f"fp32/{4 * PARAMETERS}", launcher=python)
    assert done.code == 0, document(done)["answer"]
    assert rows["all_reduce", "float32"]["calls"] == 1


def test_a_hook_on_a_model_that_does_not_train(python):
    done, rows = watched("rewrapped", launcher=python)
    assert done.code == 1
    assert rows["all_reduce", "float32"]["bytes"] == 4 * PARAMETERS
    assert any("HOOK NOT USED: gcbench.comm_hook(" in line for line in document(done)["answer"])


def test_a_job_may_send_more_than_its_hook(python):
    """Such as metrics, buffers, or the parameters that FSDP gathers."""
    done, rows = watched("metrics", launcher=python)
    assert rows["all_reduce", "float32"]["sent"] > 4 * rows["send", "uint8"]["sent"] > 0
    assert done.code == 0, document(done)["answer"]


def test_bytes_above_the_expected_ones():
    rows = [{"dtype": "float32", "sent": 800.0}, {"dtype": "uint8", "sent": 200.0}]
    settings = watch.Settings(command=["job"], expect="/900")
    (fault,) = watch.unexpected(settings, rows, [record(0, 1000.0)])
    assert fault.startswith("TOO MANY BYTES")
    more = settings.model_copy(update={"expect": "/910"})
    assert watch.unexpected(more, rows, [record(0, 1000.0)]) == []
    partial = record(1, 500.0, failures={"bytes of all_reduce": "in a CUDA graph"})
    (fault,) = watch.unexpected(more, rows, [record(0, 1000.0), partial])
    assert fault.startswith("CANNOT CHECK BYTES")
    assert "bytes of all_reduce" in fault


def test_the_bytes_of_each_rank_are_limited(python):
    """Rank 0 sends 400,000 bytes per step beside the gradient, rank 1 nothing."""
    done, rows = watched("one sends", "--expect", f"/{4 * PARAMETERS + 200_000}", launcher=python)
    assert rows["send", "float32"]["sent"] == 200_000
    assert done.code == 1
    (fault,) = [line for line in document(done)["answer"] if line.startswith("TOO MANY BYTES")]
    assert "rank 0 sends" in fault


def test_functional_collectives_are_counted_and_compared(python):
    """Those of DTensor, and those of compiled code, which skip the Autograd keys."""
    done, rows = watched("functional", "--expect", f"/{4 * PARAMETERS}", launcher=python)
    row = rows["all_reduce", "float32"]
    assert row["calls"] == 3
    assert row["bytes"] == 4 * (PARAMETERS + 150_000)
    assert row["seconds"] > 0
    assert done.code == 1
    assert any(line.startswith("TOO MANY BYTES") for line in document(done)["answer"])


@pytest.mark.parametrize("kind", ["second", "replaced"])
def test_parameters_of_every_optimizer_are_compared(kind, python):
    """One beside the first, or one instead of it, whose model is not wrapped in DDP."""
    done, _ = watched(kind, launcher=python)
    assert done.code == 1
    answer = document(done)["answer"]
    assert "2 ranks, 7 steps" in answer[0]
    (fault,) = [line for line in answer if line.startswith("RANKS DIFFER")]
    assert "parameters of optimizer 2 after step 1: ranks [1]" in fault


def test_a_rank_with_one_more_step(python):
    done, _ = watched("extra", launcher=python)
    assert done.code == 1
    steps, end = [line for line in document(done)["answer"] if line.startswith("RANKS DIFFER")]
    assert "steps of optimizer 1: 7 on ranks [0], 8 on ranks [1]" in steps
    assert "parameters at the end: ranks [1]" in end


def test_steps_of_a_rank_without_its_last_record_are_unknown():
    records = [record(rank, optimizers=[7 + rank], finished=rank == 0) for rank in range(2)]
    assert watch.uneven(records) == []


def test_a_digest_depends_on_order_and_signs():
    digest, x = recorder().digest, torch.arange(1.0, 9.0)
    others = [x.roll(2), x.flip(0), -x, x * torch.tensor([-1.0, -1, 1, 1, 1, 1, 1, 1])]
    assert digest([x]) == digest([x.clone()])
    assert digest([x]) not in [digest([other]) for other in others]


def test_ranks_that_differ_from_one_step_on(python):
    """Results of collectives are equal; only the parameters differ, after step 4 of 7."""
    done, _ = watched("differ", launcher=python)
    assert done.code == 1
    (fault,) = [line for line in document(done)["answer"] if line.startswith("RANKS DIFFER")]
    assert "parameters after step 4: ranks [1]" in fault


def test_results_that_differ_are_named():
    ranks = [
        {"rank": rank, "digests": {"all_reduce in group 0": {"0": 5, "10": 6 + rank}}}
        for rank in range(3)
    ]
    (fault,) = watch.disagreements(ranks, sharded=False)
    assert "all_reduce in group 0 at call 10: ranks [1, 2]" in fault
    equal = [{**one, "digests": ranks[0]["digests"]} for one in ranks]
    assert watch.disagreements(equal, sharded=False) == []
    shards = [{"rank": rank, "digests": {"parameters": {"4": rank}}} for rank in range(2)]
    assert "parameters after step 4: ranks [1]" in watch.disagreements(shards, sharded=False)[0]
    assert watch.disagreements(shards, sharded=True) == []


def test_a_job_that_fails_or_sends_nothing():
    failed, _ = watched("fail", launcher=[sys.executable])
    assert failed.code == 1
    assert "ended with exit code 1" in failed.err
    silent = invoke("watch", "--", sys.executable, "-c", "print('nothing')")
    assert silent.code == 1
    assert "init_process_group" in silent.err
    absent = invoke("watch", "--", "./no-such-program")
    assert absent.code == 1
    assert "./no-such-program" in absent.err


def test_the_hidden_sitecustomize_runs(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os.environ['HIDDEN'] = 'ran'")
    script = "import os, sys; sys.exit(7 if os.environ.get('HIDDEN') == 'ran' else 8)"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = invoke("watch", "--", sys.executable, "-c", script)
    assert "ended with exit code 7" in done.err
    assert os.environ.get("HIDDEN") is None


@pytest.mark.parametrize("text", ["BF16", "bf16/", "bf16/many", "1e6", "bf16/1.000.000", "/."])
def test_an_expectation_has_a_form(text):
    done = invoke("watch", "--expect", text, "--", "true")
    assert done.code == 2
    assert text in done.err


def test_a_rank_without_a_record_is_missing():
    records = [{"rank": 0, "world_size": 3}, {"rank": 2, "world_size": 3}]
    assert "[1]" in watch.missing(records)[0]
    assert watch.missing([{"rank": 0, "world_size": 1}]) == []


def test_ranks_of_another_machine_are_not_missing():
    """Each of two machines with two ranks runs the command, and has the records of its ranks."""
    records = [{"rank": rank, "world_size": 4, "here": [2, 2]} for rank in (2, 3)]
    assert watch.missing(records) == []
    assert watch.elsewhere(records) == {0, 1}
    assert "[3]" in watch.missing(records[:1])[0]
    alone = [{"rank": 0, "world_size": 2, "here": None}]
    assert "[1]" in watch.missing(alone)[0]
    assert watch.elsewhere(alone) == set()


def test_only_results_of_several_ranks_count_as_compared():
    alone = [{"digests": {"all_reduce in group 0": {"0": 5}, "parameters": {"1": 3}}}]
    assert watch.compared(alone, sharded=False) == 0
    both = [*alone, {"digests": {"all_reduce in group 0": {"0": 5}, "parameters": {"1": 3}}}]
    assert watch.compared(both, sharded=False) == 2
    assert watch.compared(both, sharded=True) == 1
    assert "equal" in watch.agreement(2)
    assert "equal" not in watch.agreement(0)
