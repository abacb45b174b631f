"""From flags and files to configs: grids, precedence, hashes, and commands that come back."""

from __future__ import annotations

import hashlib
import json
import shlex
from unittest import mock

import pytest

import gcbench
from gcbench import cli
from gcbench.core import registry, settings_file
from gcbench.core.errors import GcbenchError, UsageError
from gcbench.ops import cuda
from gcbench.results import settings
from gcbench.training import configuration, grid
from gcbench.training.configuration import Config
from gcbench.training.runner import Runner


def parse(command: str) -> list[Config]:
    """Return the configs of a `gcbench run` command, without running them."""
    words = shlex.split(command)
    result: list[Config] = []

    def keep(self, configs, *, json):
        result.extend(configs)

    with mock.patch.object(Runner, "all", keep):
        cli.app(words[words.index("run") :], standalone_mode=False)
    return result


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.0", 2.0),
        ("3", 3),
        ("2e-4", 2e-4),
        ("1E3", 1000.0),
        ("-1e+2", -100.0),
        ("true", True),
        ("False", False),
        ("null", None),
        ("clipped-max", "clipped-max"),
        ("e", "e"),
        ("0,1,2", [0, 1, 2]),
        ("none, terngrad", ["none", "terngrad"]),
        ("500/750", (500, 750)),
        ("0:0.25/100:0.01", {0: 0.25, 100: 0.01}),
        ("0:2e-1,0.5", [{0: 0.2}, 0.5]),
        ("0:tensor/7:512", {0: "tensor", 7: 512}),
        ("0.9/0.999,0.5/0.9", [(0.9, 0.999), (0.5, 0.9)]),
        ("some/path", "some/path"),
    ],
)
def test_values_of_flags(text, value):
    result = grid.value(text)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("word", "read"),
    [("yes", "yes"), ("off", "off"), ("010", "010"), ("0x10", "0x10"), ("1_000", "1_000")],
)
def test_words_of_old_yaml_are_text(word, read, tmp_path):
    assert grid.value(word) == read
    (tmp_path / "c.yaml").write_text(f"lr: {word}\n")
    assert settings_file.read(tmp_path / "c.yaml") == {"lr": read}


@pytest.mark.parametrize(
    "words",
    [
        "--workers yes",
        "--workers true",
        "--workers 010",
        "--lr true",
        "--seed 1.0",
        "--set clip=0:1.0/0:2.0",
    ],
)
def test_misreadings_are_refused(words):
    with pytest.raises(UsageError):
        parse(f"gcbench run {words}")


def test_a_suite_needs_a_name():
    with pytest.raises(UsageError, match="--suite"):
        parse("gcbench run --suite ''")


def test_a_key_of_a_file_comes_once(tmp_path):
    (tmp_path / "c.yaml").write_text("lr: 0.1\noptions: {clip: 1.0, clip: 2.0}\n")
    with pytest.raises(UsageError, match="key 'clip' is repeated"):
        settings_file.read(tmp_path / "c.yaml")


def test_false_is_no_true_word():
    (created,) = parse("gcbench run --set share=False")
    assert created.make_compressor().share is False
    assert created.collective == "allgather"


def test_a_grid_is_the_product_of_its_lists():
    created = parse("gcbench run --compressor none,terngrad --seed 0,1,2 --set clip=0,2.0")
    assert len(created) == 3 + 3 * 2  # none has no clip: it comes once a seed
    assert len({one.hash for one in created}) == 9
    assert {one.options.get("clip") for one in created if one.compressor == "none"} == {None}
    assert {one.options["clip"] for one in created if one.compressor == "terngrad"} == {0, 2.0}
    assert len(parse("gcbench run --seed 1,1,1")) == 1


def test_a_memory_is_the_methods_own_unless_given():
    created = parse("gcbench run --compressor none,onebit,demo,topk")
    assert [one.memory for one in created] == ["none", "residual", "residual", "residual"]
    assert [one.memory_options for one in created] == [{}, {}, {"decay": 0.999}, {}]
    created = parse("gcbench run --compressor topk --memory none,residual --memory-set decay=0.5,1")
    assert [(one.memory, one.memory_options) for one in created] == [
        ("none", {}),
        ("residual", {"decay": 0.5}),
        ("residual", {"decay": 1.0}),
    ]


def test_schedules_hold_from_their_steps():
    (created,) = parse("gcbench run --compressor topk --set ratio=0:0.25/100:0.01 --start-step 7")
    assert created.options == {"ratio": {0: 0.25, 100: 0.01}}
    assert created.stages() == [0, 7, 100]
    assert [created.make_compressor(step).ratio for step in (0, 99, 100)] == [0.25, 0.25, 0.01]
    again = Config.model_validate_json(created.model_dump_json())
    assert again == created
    assert again.hash == created.hash


def test_a_schedule_in_a_file_is_a_mapping(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("compressor: topk\noptions: {ratio: {0: 0.25, 100: 1e-2}}\nmemory: dgc\n")
    (created,) = parse(f"gcbench run --config {path} --memory-set momentum=0.5")
    assert created.options == {"ratio": {0: 0.25, 100: 0.01}}
    assert (created.memory, created.memory_options) == ("dgc", {"momentum": 0.5})


def test_a_schedule_in_python_has_each_step_once():
    with pytest.raises(UsageError, match="repeated"):
        Config.make({"compressor": "topk", "options": {"ratio": {0: 0.25, "0": 0.01}}})
    whole = Config.make({"compressor": "topk", "options": {"ratio": {0: 0.25, 1e2: 0.01}}})
    assert whole.options == {"ratio": {0: 0.25, 100: 0.01}}


def test_a_setting_at_its_default_leaves_the_hash_as_it_is(monkeypatch):
    """A config stored before a setting existed has the hash of one with the setting's default."""
    created = Config.make({"task": "quadratic", "lr": 0.25, "momentum": 0.0})
    stored = created.model_dump(mode="json")
    changed = {key: value for key, value in stored.items() if settings.DEFAULTS.get(key) != value}
    assert {"lr": 0.25}.items() <= changed.items()
    assert "momentum" not in changed
    named = created.hash
    assert named == configuration.hash_of(stored) == configuration.hash_of(changed)
    text = json.dumps(changed, sort_keys=True)
    assert created.hash == hashlib.sha256(text.encode()).hexdigest()[:10]
    for key in settings.DEFAULTS:
        assert configuration.hash_of({**stored, key: "another"}) != created.hash
    monkeypatch.setitem(settings.DEFAULTS, "momentum", 0.9)
    assert configuration.hash_of(stored) != named, "another default is another run"


def test_lists_of_sequences():
    created = parse("gcbench run --schedule step --schedule-steps 5/7,9 --optimizer adam")
    assert [one.schedule_steps for one in created] == [[5, 7], [9]]
    created = parse("gcbench run --schedule step --schedule-steps 5,9 --optimizer adam")
    assert [one.schedule_steps for one in created] == [[5], [9]]
    created = parse("gcbench run --optimizer adam --betas 0.5/0.9,0.9/0.99")
    assert [one.betas for one in created] == [(0.5, 0.9), (0.9, 0.99)]


def test_a_file_has_the_same_keys_and_flags_win(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        "task: quadratic\ncompressor: [none, terngrad]\nsteps: 7\nlr: 2e-3\nseed: [4, 5]\n"
        "options: {clip: 1e-1, scale: c-sigma}\ntask_options: {dimension: 16}\n"
        "schedule: step\nschedule_steps: [2, 4]\n"
    )
    created = parse(f"gcbench run --config {path} --seed 9 --set clip=3.0")
    assert [(one.compressor, one.seed, one.steps, one.lr) for one in created] == [
        ("none", 9, 7, 2e-3),
        ("terngrad", 9, 7, 2e-3),
    ]
    assert created[1].options == {"clip": 3.0, "scale": "c-sigma"}
    assert created[1].task_options == {"dimension": 16}
    assert created[1].schedule_steps == [2, 4]
    (alone,) = parse(f"gcbench run --config {path} --seed 9 --compressor terngrad")
    assert alone.options["clip"] == 0.1
    (beside,) = parse(f"gcbench run --config {path} --seed 9 --compressor terngrad:clip=3")
    assert beside.options == {"clip": 3.0, "scale": "c-sigma"}
    path.write_text("task: quadratic\ncompressor: ['topk:ratio=0.5', none]\n")
    created = parse(f"gcbench run --config {path} --set ratio=0.25")
    assert [one.options for one in created] == [{"ratio": 0.25}, {}]
    path.write_text("compressor: 'topk:ratio=0.5'\noptions: {ratio: 0.25}\n")
    with pytest.raises(UsageError, match="ratio"):
        parse(f"gcbench run --config {path}")


COMMANDS = [
    "",
    "--task quadratic --compressor none --workers 8 --seed 3",
    "--set clip=0 --set share=False --set granularity=512",
    "--set clip=1e-05 --set scale=c-sigma --collective allgather",
    "--set granularity=column --dense-last --dense-below 20",
    "--task quadratic --task-set noise=0.5 --task-set dimension=33 --momentum 0.5 --nesterov",
    "--network conv --optimizer adam --betas 0.5/0.99 --eps 1e-05 --ema 0.99",
    "--schedule step --schedule-steps 5/7 --schedule-gamma 0.5 --weight-decay 5e-4 --decay update",
    "--schedule step --schedule-steps 9 --no-nesterov --no-dense-last",
    "--schedule step --schedule-steps 0.5/0.75 --warmup 3",
    "--warmup 0.25",
    "--schedule constant --momentum 0 --engine spawn --threads 1 --eval-every 0",
    "--task cifar10 --steps 10 --batch 128 --lr 0.2",
    "--task mnist --weight-decay 0 --ema 0 --gradients batched --on-nonfinite skip",
    "--compressor topk --set ratio=0:0.25/100:0.01 --memory dgc --memory-set momentum=0.5",
    "--compressor demo --memory-set decay=0.9 --delay 1 --rebroadcast-every 10 --start-step 5",
    "--compressor onebit --memory none --set granularity=tensor",
    "--compressor onebit --memory-set at_owner=false",
    "--compressor terngrad --memory forced-residual --set clip=0:2.5/50:0",
    "--compressor fft --set low=0:null/10:-0.3 --set high=0:null/10:0.3",
    "--compressor randomk --set scaled=0:true/10:false",
    "--compressor signsgd --memory momentum",
    "--link-gbit 0.5 --link-latency-us 1e3 --log-every 3 --backend reference",
    "--local-steps 5 --outer-lr 0.7 --outer-momentum 0.9 --outer-nesterov",
    "--compressor fp16 --engine ddp --hook torch --bucket-mb 0.5",
    "--compressor topk --memory loco --memory-set beta=0.5",
    "--compressor dlion --memory none --local-steps 5 --outer-lr 1",
    "--optimizer muon",
    "--task shakespeare --optimizer muon --momentum 0 --no-nesterov",
]


@pytest.mark.parametrize("flags", COMMANDS)
def test_the_recorded_command_gives_the_same_config(flags):
    (created,) = parse(f"gcbench run {flags}")
    (again,) = parse(configuration.command(created))
    assert again == created
    assert again.hash == created.hash


@pytest.mark.parametrize("task", ["quadratic", "digits", "mnist", "cifar10", "shakespeare"])
def test_the_recorded_command_says_only_what_differs(task):
    (created,) = parse(f"gcbench run --task {task}")
    assert configuration.command(created) == f"gcbench run --task {task} --compressor terngrad"


def test_words_with_blanks_are_quoted():
    created = Config.make({"task": "quadratic", "device": "a b; c"})
    assert "--device 'a b; c'" in configuration.command(created)


def test_the_hash_names_the_config():
    base = {"task": "quadratic"}
    created = Config.make(base)
    assert len(created.hash) == 10
    assert created.run_name == f"quadratic-terngrad-{created.hash}"
    assert Config.model_validate_json(created.model_dump_json()).hash == created.hash
    assert Config.make({**base, "batch": 32}).hash == created.hash  # the task's own default
    for other in ({"seed": 1}, {"lr": 0.2}, {"options": {"clip": 1.0}}, {"engine": "spawn"}):
        assert Config.make({**base, **other}).hash != created.hash


def test_the_repr_of_a_method_evaluates_back():
    from gcbench.core.registry import compressor_class

    method = gcbench.get_compressor("terngrad", clip=1.5, share=False, granularity=64)
    assert eval(repr(method), {"TernGrad": compressor_class("terngrad")}) == method


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ({"schedule": "constant"}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "poly", "schedule_power": 0.5}, [1.0, 0.75**0.5, 0.5**0.5, 0.5]),
        ({"schedule": "step", "schedule_steps": [1, 3]}, [1.0, 0.1, 0.1, 0.01]),
        ({"schedule": "step", "schedule_steps": [0.5, 3]}, [1.0, 1.0, 0.1, 0.01]),
        ({"schedule": "constant", "warmup": 3}, [1 / 3, 2 / 3, 1.0, 1.0]),
        ({"schedule": "constant", "warmup": 0.75}, [1 / 3, 2 / 3, 1.0, 1.0]),
        ({"schedule": "constant", "warmup": 1}, [1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "poly", "schedule_power": 1, "warmup": 2}, [0.5, 0.75, 0.5, 0.25]),
        ({"schedule": "step", "schedule_steps": [1], "warmup": 4}, [0.25, 0.05, 0.075, 0.1]),
    ],
)
def test_learning_rates(schedule, rates):
    created = Config.make({"task": "quadratic", "lr": 1.0, "steps": 4, **schedule})
    assert [created.lr_at(step) for step in range(4)] == pytest.approx(rates)


BAD = {
    "--task digit": "unknown task 'digit'. Did you mean 'digits'? Known: cifar10, digits",
    "--compressor ternary": "unknown compressor 'ternary'. Did you mean 'terngrad'? Known: ",
    "--set clp=2": "unknown field of compressor terngrad: 'clp'. Did you mean 'clip'? Known: clip",
    "--compressor none --set clip=2": "unknown field of compressor none: 'clip'",
    "--task-set netwrk=conv": "unknown field of task digits: 'netwrk'. Did you mean 'network'?",
    "--network resnet": "unknown network 'resnet'",
    "--network conv --task-set network=mlp": "leave one of them out",
    "--set clip": "--set 'clip': expected NAME=VALUE",
    "--set clip=1 --set clip=2": "clip=1,2",
    "--set clip=abc": "clip='abc': input should be a valid number",
    "--set clip=-1": "clip=-1",
    "--set clip=.nan": "clip=nan",
    "--set share=maybe": "share='maybe': input should be a valid boolean",
    "--set granularity=0": "granularity 0: expected",
    "--set granularity=row": "granularity 'row': expected",
    "--task quadratic --task-set dimension=1.5": "dimension=1.5: input should be a valid integer",
    "--collective tree": "collective 'tree': allowed are allreduce, allgather, twoshot, ring",
    "--collective ring": "does not support collective ring",
    "--set share=false --collective twoshot": "does not support collective twoshot",
    "--compressor none,terngrad --set share=false --collective allreduce": "Legal: allgather",
    "--workers 5": "batch 64 does not divide among 5 workers; try --batch 65",
    "--workers 100": "try --batch 100",
    "--workers 0": "workers=0: input should be greater than or equal to 1",
    "--warmup 20 --steps 10": "warmup=20",
    "--warmup=-1": "warmup=-1: input should be greater than or equal to 0",
    "--workers 2.5": "workers=2.5: input should be a valid integer",
    "--workers four": "workers='four': input should be a valid integer",
    "--batch -64": "batch=-64",
    "--steps 0": "steps=0",
    "--seed -1": "seed=-1",
    "--seed 0,,1": "--seed '0,,1'",
    "--compressor none,": "--compressor 'none,'",
    "--compressor null": "compressor null",
    "--compressor topk:": "topk: ''",
    "--memory none,": "--memory 'none,'",
    "--memory ''": "--memory ''",
    "--set clip=1,": "--set clip '1,'",
    "--straggler 1": "straggler=1: expected RANK:FACTOR",
    "--lr nan": "lr='nan': input should be a valid number",
    "--lr .inf": "lr=inf: input should be a finite number",
    "--lr 0": "lr=0: input should be greater than 0",
    "--lr fast": "lr='fast': input should be a valid number",
    "--momentum 1": "momentum=1",
    "--momentum 0 --nesterov": "nesterov needs momentum > 0",
    "--schedule step": "schedule=step needs schedule_steps, e.g. --schedule-steps 0.5/0.75",
    "--schedule linear": "schedule='linear': input should be 'constant', 'poly', 'step' or",
    "--betas 0.9": "betas",
    "--betas 0.9/1.5": "betas.1=1.5",
    "--lr 0.1/0.2": "lr: expected one value, not 0.1/0.2",
    "--optimizer lion": "optimizer='lion': input should be 'sgd', 'adam', 'adamw' or 'muon'",
    "--engine mpi": "engine='mpi': input should be 'simulate', 'spawn', 'torchrun' or 'ddp'",
    "--gradients batched --engine spawn": "use gradients=loop",
    "--link-gbit 0": "link_gbit=0",
    "--memory residual": "--memory forced-residual",
    "--memory residul": "unknown memory 'residul'. Did you mean 'residual'?",
    "--memory-set decay=0.5": "memory none has no field 'decay'; forced-residual and residual do",
    "--memory-set dekay=0.5": "unknown field of memory none: 'dekay'. Did you mean 'decay'?",
    "--compressor topk --memory-set decay=2": "decay=2.0",
    "--compressor topk --set ratio=5:0.1": "ratio=5:0.1",
    "--compressor topk --set ratio=0:0.1/9:7": "ratio=7.0",
    "--compressor topk --set ratio=0:0.1/x:7": "ratio='0:0.1/x:7': input should be a valid number",
    "--compressor randomk --set scaled=0:false/9:true --memory residual": "--memory none",
    "--compressor dion --set mu=0:0.95/9:0.5": "mu changes from 0.95 to 0.5: memory 'dion'",
    "--compressor onebitadam --set beta1=0:0.9/9:0.5": "beta1 changes from 0.9 to 0.5",
    "--compressor onebitadam --start-step 5 --set eps=.inf": "eps=inf",
    "--compressor onebitadam --start-step 5 --set eps=0:1e-8/9:.nan": "eps=nan",
    "--delay 2": "delay=2: expected 0 or 1 without --local-steps",
    "--start-step -1": "start_step=-1",
    "--rebroadcast-every x": "rebroadcast_every='x'",
}


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--optimizer adam --momentum 0.9", "momentum"),
        ("--optimizer sgd --betas 0.9/0.95", "betas"),
        ("--optimizer adamw --schedule constant,poly --schedule-gamma 0.2", "schedule_gamma"),
        ("--engine spawn --link-gbit 1", "link_gbit"),
        ("--optimizer adam,sgd --momentum 0.9 --schedule-power 0.5", None),
        ("--task cifar10 --optimizer adam --eps 1e-6 --link-gbit 1", None),
    ],
)
def test_settings_that_nothing_uses_are_named(flags, named, capsys):
    parse(f"gcbench run {flags}")
    lines = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert [line.split()[1] for line in lines] == ([named] if named else [])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--compressor onebitadam --steps 50", "onebitadam never compresses: start_step=100"),
        ("--compressor onebitadam --steps 101", ""),
        ("--steps 400 --schedule step --schedule-steps 0.5/500/750", "schedule_steps 500/750: "),
        ("--compressor topk:ratio=0:0.1/60:0.01 --steps 60", "ratio: its value from step 60 "),
        ("--compressor topk:ratio=0:0.1/60:0.01 --steps 61", ""),
        ("--compressor none --steps 50 --start-step 60", ""),
    ],
)
def test_what_begins_after_the_last_step_is_named(flags, sentence, capsys):
    parse(f"gcbench run {flags}")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
    assert [line[6 : 6 + len(sentence)] for line in notes] == [sentence] * bool(sentence)


def test_the_recipe_is_that_of_the_last_step_and_of_what_steps():
    """A stage after the run had set the rate; a sign step's rate was that of plain inner steps."""
    later = {"sign": {0: True, 1000: False}}
    short, long = (
        Config.make({"task": "digits", "compressor": "demo", "options": later, "steps": steps})
        for steps in (400, 1001)
    )
    plain = Config.make({"task": "digits", "compressor": "none"})
    assert (short.lr, short.momentum) == (0.001, 0.0) != (plain.lr, plain.momentum)
    assert (long.lr, long.momentum) == (plain.lr, plain.momentum)
    local = {"task": "digits", "local_steps": 4, "outer_lr": 0.001}
    for name in ("signsgd", "demo"):
        inner = Config.make({**local, "compressor": name})
        assert (inner.lr, inner.momentum) == (plain.lr, plain.momentum)
        assert Config.make({**local, "compressor": name, "lr": 0.7}).lr == 0.7


def test_a_fraction_of_the_steps_is_a_whole_step():
    """0.55 * 100 is 55.00000000000001."""
    for share, step in ((0.55, 55), (0.07, 7), (0.28, 28), (0.5, 50), (0.555, 56)):
        settings = {"task": "digits", "steps": 100, "schedule": "step", "schedule_steps": [share]}
        rates = [Config.make(settings).lr_at(each) for each in range(100)]
        assert sum(rate == rates[0] for rate in rates) == step


def test_a_call_names_the_settings_that_nothing_uses(tmp_path):
    settings = {"task": "quadratic", "steps": 2, "optimizer": "adam", "momentum": 0.9}
    with pytest.warns(UserWarning, match="momentum has no effect with optimizer adam"):
        gcbench.run(**settings, results=tmp_path)


@pytest.mark.parametrize("flags", BAD)
def test_bad_settings_are_refused_in_one_line(flags):
    with pytest.raises(UsageError) as caught:
        parse(f"gcbench run {flags}")
    assert BAD[flags] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "Known: ." not in str(caught.value), "a list of choices has some"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 5\n", "unknown setting 'stepz'. Did you mean 'steps'? Known: adversaries, attack"),
        ("5: 5\n", "key 5"),
        ("steps: [1, 2\nlr: }", "not valid YAML: while parsing"),
        ("\x00", "not valid YAML"),
        ("- steps\n", "expected a mapping"),
        ("options: 3\n", "options: expected a mapping of fields, not 3"),
        ("options: {7: 3}\n", "unknown field of compressor terngrad: 7"),
        ("seed: []\n", "seed: the list is empty"),
        ("task: {a: b}\n", "unknown task"),
        ("lr: {a: b}\n", "lr={'a': 'b'}"),
        ("compressor: topk\noptions: {ratio: {0: 1, 0.5: 0.1}}\n", "ratio={0: 1, 0.5: 0.1}"),
        ("compressor: topk\noptions: {ratio: {0: 1, 9.7: 0.1}}\n", "ratio={0: 1, 9.7: 0.1}"),
        ("compressor: topk\noptions: {ratio: {0: 1, .inf: 0.1}}\n", "ratio={0: 1, inf: 0.1}"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        parse(f"gcbench run --config {path}")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(UsageError, match="No such file or directory"):
        grid.expand({}, tmp_path / "none.yaml")
    with pytest.raises(UsageError, match="is a folder"):
        grid.expand({}, tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x9d\x00")
    with pytest.raises(UsageError, match="not valid YAML"):
        grid.expand({}, tmp_path / "binary.yaml")


def test_equal_options_are_one_config():
    two = Config.make({"compressor": "terngrad", "options": {"clip": 2}})
    assert two.options == {"clip": 2.0}
    assert two.hash == Config.make({"compressor": "terngrad", "options": {"clip": 2.0}}).hash
    (noisy,) = parse("gcbench run --task quadratic --task-set noise=2,2.0")
    assert type(noisy.task_options["noise"]) is float
    (photos,) = parse("gcbench run --task imagenet --task-set folder=2012")
    assert photos.task_options == {"folder": "2012"}
    assert parse(configuration.command(photos)) == [photos]


def test_a_memory_that_cannot_be_loaded_hides_no_other(monkeypatch):
    def load():
        raise GcbenchError("'broken' of the package somebodys cannot be loaded")

    entry = registry.Entry("broken", "somebodys", load)
    monkeypatch.setitem(registry.memories(), "broken", entry)
    with pytest.raises(UsageError, match=r"no field 'decay'; forced-residual and residual do"):
        parse("gcbench run --memory-set decay=0.5")


def test_a_missing_backend_is_an_error_with_the_reason(monkeypatch):
    assert Config.make({"backend": "auto"}).backend == "auto"
    monkeypatch.setattr(cuda, "status", lambda: (False, "nobody brought a GPU"))
    with pytest.raises(UsageError, match=r"backend 'cuda' is unavailable: nobody brought a GPU"):
        Config.make({"backend": "cuda"})
    monkeypatch.setattr(cuda, "status", lambda: (True, ""))
    with pytest.raises(UsageError, match=r"'cuda' is for cuda tensors, and these are on cpu"):
        Config.make({"backend": "cuda"})
    with pytest.raises(UsageError, match=r"unknown backend 'refrence'. Did you mean 'reference'"):
        Config.make({"backend": "refrence"})
