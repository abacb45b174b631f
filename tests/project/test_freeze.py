"""The freeze: what it compares, what it may leave out, and that a changed result is named."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor

import freeze
import pytest
import yaml
from freeze import FreezeError, Normalizer

SUMMARY = {
    "params_sha256": "4283bd",
    "payload_bytes_up": 520.0,
    "phase_seconds": {"encode": 0.25, "communicate": None},
    "communicate_modelled": {"seconds": 0.5},
    "seconds": 1.5,
    "config": {"clip": 2.5, "threads": 1},
    "provenance": {"started": "2026-01-01T00:00:00", "command": "gcbench run", "commit": "ab"},
}
ENTRY = {
    "commands": [
        {"exit_code": 0, "stdout": [SUMMARY], "stderr": ["wrote /tmp/x/a", "done"]},
        {"stdout": {"step_seconds": 0.5}},
    ],
    "tables": {"metrics.parquet": {"columns": {"step": [1, 2], "seconds": [0.1, 0.2]}}},
}


def document(told, name="runs/one"):
    clean = Normalizer(name, {"/tmp/x": "<folder>"})
    told = clean.value(told)
    clean.check()
    return {
        "script": "s",
        "machine": {"cores": 2},
        "inputs": {},
        "entries": {name: told},
        "leaves": {name: {"kept": clean.kept, "dropped": dict(clean.dropped)}},
        "unexpected": [],
    }


def changed(*path, to, entry=ENTRY):
    """Return the entry with another value at a path."""
    entry = copy.deepcopy(entry)
    place = entry
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return entry


OUT = ("commands", 0, "stdout", 0)
MUTANTS = {
    "a parameter": ((*OUT, "params_sha256"), "4283be"),
    "a byte more": ((*OUT, "payload_bytes_up"), 521.0),
    "another type": ((*OUT, "config", "threads"), 1.0),
    "true for 1": ((*OUT, "config", "threads"), True),
    "another default": ((*OUT, "config", "clip"), 3.0),
    "a modelled time": ((*OUT, "communicate_modelled", "seconds"), 0.25),
    "a time where none was": ((*OUT, "phase_seconds", "communicate"), 0.1),
    "no time where one was": ((*OUT, "phase_seconds", "encode"), None),
    "a word for a time": ((*OUT, "seconds"), "long"),
    "another exit code": (("commands", 0, "exit_code"), 1),
    "another message": (("commands", 0, "stderr", 1), "Done"),
    "another column": (("tables", "metrics.parquet", "columns", "loss"), [1.0, 2.0]),
    "another value": (("tables", "metrics.parquet", "columns", "step"), [1, 3]),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_change_is_named(name, capsys):
    path, to = MUTANTS[name]
    found = freeze.compare(document(ENTRY), document(changed(*path, to=to)))
    ((entry, (one,)),) = found.items()
    assert entry == "runs/one"
    assert str(path[-1]) in one.path
    assert freeze.show(document(ENTRY), document(changed(*path, to=to))) == 1
    assert one.path in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "to"),
    [
        ((*OUT, "seconds"), 9.5),
        (("commands", 1, "stdout", "step_seconds"), 9.5),
        ((*OUT, "phase_seconds", "encode"), 9.5),
        ((*OUT, "provenance", "started"), "2027-02-02T00:00:00"),
        ((*OUT, "provenance", "commit"), "cd"),
        (("tables", "metrics.parquet", "columns", "seconds"), [5.0, 6.0]),
    ],
)
def test_what_is_volatile_is_not_compared(path, to, capsys):
    assert freeze.show(document(ENTRY), document(changed(*path, to=to))) == 0
    assert capsys.readouterr().out.startswith("nothing differs: 1 entries, 12 values compared, 7")


def test_times_of_stored_results_are_compared():
    """They are measured in runs, and mere inputs of the other commands."""
    other = changed(*OUT, "seconds", to=9.5)
    assert freeze.compare(document(ENTRY), document(ENTRY)) == {}
    assert freeze.compare(document(ENTRY, "commands/a"), document(other, "commands/a"))


def test_folders_and_times_in_texts_are_replaced():
    clean = Normalizer("commands/a", {"/tmp/x": "<folder>"})
    text = "wrote /tmp/x/a at 2026-01-01T10:00:00+00:00 by gcbench 0.1.0 in 3 steps"
    assert clean.text(text) == "wrote <folder>/a at <time> by gcbench <version> in 3 steps"
    assert clean.value({"/tmp/x/a": 1}) == {"<folder>/a": 1}


def test_every_pattern_gives_its_reason_and_none_swallows_an_entry(monkeypatch):
    assert all(each.reason for each in (*freeze.VOLATILE, *freeze.TEXTS))
    greedy = (freeze.Volatile("*", r".*", "everything"),)
    monkeypatch.setattr(freeze, "VOLATILE", greedy)
    with pytest.raises(FreezeError, match=r"runs/one: 1 values kept and 18 dropped"):
        document(ENTRY)
    with pytest.raises(FreezeError, match="0 values kept"):
        document({})


def test_entries_that_come_or_go_differ():
    one, two = document(ENTRY), document(ENTRY)
    two["entries"]["runs/two"] = ENTRY
    (added,) = freeze.compare(one, two)["runs/two"]
    (gone,) = freeze.compare(two, one)["runs/two"]
    assert (added.before, gone.after) == (freeze.ABSENT, freeze.ABSENT)


def test_documents_that_say_nothing_are_refused():
    good = document(ENTRY)
    with pytest.raises(FreezeError, match="second document has no entries"):
        freeze.compare(good, {**good, "entries": {}})
    for key in ("script", "machine", "inputs"):
        with pytest.raises(FreezeError, match=f"differ in {key}"):
            freeze.compare(good, {**good, key: "other"})
    with pytest.raises(FreezeError, match=r"did not end as they should.*exit code 1"):
        freeze.compare({**good, "unexpected": ["runs/one: exit code 1"]}, good)


@pytest.mark.parametrize(
    ("a", "b", "paths"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, [" (order of keys)"]),
        ([1, 2], [1, 2, 3], [" (length)"]),
        (["a", "b", "c"], ["a", "c"], ["[1:2]"]),
        ([0.0, float("nan")], [0.0, float("nan")], []),
        ([0.1], [0.1 + 2**-56], ["[0]"]),
        (None, 0, [""]),
    ],
)
def test_values_are_compared_exactly(a, b, paths):
    assert [each.path for each in freeze.differences(a, b)] == paths


def test_of_long_texts_the_part_that_differs_is_shown():
    (one,) = freeze.differences("a" * 300 + "left" + "b" * 300, "a" * 300 + "right" + "b" * 300)
    assert "aleftb" in one.before
    assert "arightb" in one.after
    assert len(one.before) <= 160


def test_a_page_is_read_by_heading():
    text = "<h1>Runs</h1><p>a</p><script>x</script><h2>Bits</h2>{}<h2>Bits</h2><td>3</td>"
    one, two = (freeze.page(text.format(f"<td>{n}</td>"), Normalizer("x")) for n in (1, 2))
    assert list(one) == ["0 ", "1 Runs", "2 Bits", "3 Bits"]
    assert [each["texts"] for each in one.values()] == [0, 1, 1, 1]
    assert [each.path for each in freeze.differences(one, two)] == ["2 Bits.sha256"]


def test_golden_payloads_are_compared_by_content(tmp_path):
    folder = tmp_path / "tests" / "golden"
    with pytest.raises(FreezeError, match="no golden payloads"):
        freeze.golden(tmp_path)
    folder.mkdir(parents=True)
    digests = []
    for text in ('{"a": 1, "b": 2}', '{"b": 2,\n "a": 1}', '{"a": 1, "b": 3}'):
        (folder / "x.json").write_text(text)
        digests.append(freeze.golden(tmp_path)["x.json"])
    assert digests[0] == digests[1] != digests[2]


METHODS = [
    {
        "name": name,
        "collectives": collectives,
        "memory": memory,
        "unbiased": False,
        "contractive": contractive,
        "fields": fields,
    }
    for name, collectives, memory, contractive, fields in (
        ("one", ["allreduce", "allgather"], "none", False, {"share": 0.5, "bits": 4}),
        ("two", ["allgather"], "residual", True, {}),
        ("three", ["allgather"], "residual", True, {}),
    )
]


def test_every_method_meets_what_is_legal_for_it():
    entries = {each.name: " ".join(each.commands[0].words) for each in freeze.runs(METHODS)}
    assert freeze.kinds(METHODS) == ["one", "two"]
    assert entries["runs/simulate allgather"].endswith("--compressor one,two,three")
    assert entries["runs/simulate allreduce"].endswith("--compressor one")
    assert entries["runs/memory dgc"].endswith("two,three --memory-set masking=false")
    assert entries["runs/memory momentum"].endswith("--compressor one,two,three")
    assert entries["runs/schedules"].endswith("--compressor one --set share=0:0.5/2:0.25")
    assert len({each.name for each in freeze.runs(METHODS)}) == len(list(freeze.runs(METHODS)))


FAKE = """
import json, pathlib, sys, time
word, folder = sys.argv[1], pathlib.Path("runs/one")
folder.mkdir(parents=True, exist_ok=True)
metrics = folder / "metrics.jsonl"
if word == "fail":
    sys.exit("no")
begun = len(metrics.read_text().splitlines()) if metrics.exists() else 0
with metrics.open("a") as file:
    for step in range(begun, 4):
        print("{}", file=file, flush=True)
        try:
            time.sleep(60 if word == "long" and begun == 0 and step == 2 else 0)
        except KeyboardInterrupt:
            sys.exit(130)
print(json.dumps({"steps": 4, "here": str(pathlib.Path.cwd())}))
"""


@pytest.fixture
def fake(tmp_path):
    """A machine whose gcbench is a few lines: it trains nothing, and can be interrupted."""
    tree, scratch = tmp_path / "tree", tmp_path / "scratch"
    for path in (tree / "gcbench", tree / "results", scratch):
        path.mkdir(parents=True)
    (tree / "gcbench" / "__init__.py").touch()
    (tree / "gcbench" / "__main__.py").write_text(FAKE)
    return freeze.Machine(tree, tree / "results", scratch)


def test_an_entry_keeps_what_its_commands_did(fake):
    names = ("work", "fail")
    commands = tuple(freeze.Command((name,)) for name in names)
    found = fake.run(freeze.Entry("runs/fake", commands))
    work, fail = found["told"]["commands"]
    assert work["stdout"] == {"steps": 4, "here": "<folder>"}
    assert (fail["exit_code"], fail["stderr"]) == (1, ["no"])
    assert found["told"]["files"] == ["runs/one/metrics.jsonl"]
    assert found["unexpected"] == ["runs/fake: exit code 1, no"]
    assert not list(fake.scratch.iterdir())


def test_a_run_is_interrupted_and_goes_on(fake):
    stopped = freeze.Command(("long",), 130, stop_after=3)
    found = fake.run(freeze.Entry("runs/fake", (stopped, freeze.Command(("long",)))))
    first, second = found["told"]["commands"]
    assert first == {"words": ["long"], "exit_code": 130}  # what it said depends on chance
    assert (second["exit_code"], second["stdout"]["steps"]) == (0, 4)
    assert found["unexpected"] == []


def test_entries_that_ended_well_are_not_run_again(fake, tmp_path):
    todo, done = [], {}
    for word in ("work", "fail"):
        entry = freeze.Entry(f"runs/{word}", (freeze.Command((word,)),))
        todo.append((entry, tmp_path / f"{word}.json"))
    freeze._work(fake, todo, 2, done)
    assert done.keys() == {"runs/work", "runs/fail"}
    assert json.loads((tmp_path / "work.json").read_text()) == done["runs/work"]
    assert not (tmp_path / "fail.json").exists()


def test_what_is_killed_when_the_freeze_stops_is_no_result(fake):
    entry = freeze.Entry("runs/fake", (freeze.Command(("long",)),))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(fake.run, entry)
        while not list(fake.scratch.glob("*/runs/one/metrics.jsonl")):
            assert not running.done()
        fake.stop()
        with pytest.raises(FreezeError, match="stopped"):
            running.result(timeout=30)


def test_patterns_choose_entries():
    assert freeze._chosen("runs/delay", [])
    assert freeze._chosen("runs/delay", ["payloads,runs"])
    assert freeze._chosen("runs/delay", ["runs/de*"])
    assert not freeze._chosen("runs/delay", ["payloads", "runs/e*"])
    assert freeze._chosen("commands", ["runs,commands/help*"])
    assert not freeze._chosen("commands", ["runs/*"])


def test_every_golden_configuration_is_run(tmp_path):
    folder = tmp_path / "tests" / "golden"
    folder.mkdir(parents=True)
    (folder / "one.json").write_text('{"default": {}, "bits=4 share=False": {}}')
    (entry,) = freeze.variants(tmp_path)
    ((name, text),) = entry.given
    suite = yaml.safe_load(text)
    assert name in entry.commands[0].words
    assert [each["config"] for each in suite["entries"]] == [
        {"compressor": "one", "options": {}},
        {"compressor": "one", "options": {"bits": 4, "share": False}},
    ]


def test_the_command_line_compares_files(tmp_path, capsys):
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, told in zip(paths, (ENTRY, changed("commands", 0, "exit_code", to=2)), strict=True):
        path.write_text(json.dumps(document(told)))
    a, b = map(str, paths)
    assert freeze.main(["compare", a, a]) == 0
    assert freeze.main(["compare", a, b]) == 1
    paths[1].write_text("{}")
    assert freeze.main(["compare", a, b]) == 2
    assert "freeze: the second document has no entries" in capsys.readouterr().err
