"""The blocks of README and the guides run, their tables are current, their links lead to files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pages
import pytest
from commands import ROOT, invoke
from pages import GENERATED, PageError, blocks, generated
from preloaded import Programs

import gcbench
from gcbench.commands import help as helping
from gcbench.core.errors import GcbenchError

SECONDS = 300
"""Limit for a block. A guide takes about ten seconds where nothing else runs."""
HERE = Path(__file__).parent
NAMES = [str(path.relative_to(ROOT)) for path in pages.pages()]


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def words(text: str) -> list[str]:
    """Return what must be alike in shown and printed output: all but numbers and rules."""
    return [word for word in text.split() if not re.search(r"\d|^[─-]+$", word)]


def follow(text: str, programs: Programs, folder: Path) -> None:
    """Run the blocks of a page in order; a `text` block must be in the output before it."""
    output = ""
    for block in blocks(text):
        if block.language == "text":
            shown, printed = words(block.text), " ".join(words(output))
            assert " ".join(shown) in printed, f"line {block.line}: not what was printed\n{output}"
        elif not block.left_out:
            done = programs.shell(block.script, folder, SECONDS)
            output = done.stdout
            assert done.returncode == 0, f"line {block.line}: exit code {done.returncode}\n" + (
                f"{block.text}\n{done.stdout}\n{done.stderr}"
            )


@pytest.mark.parametrize("name", NAMES)
def test_a_page_runs_from_an_empty_folder(name, programs, tmp_path):
    follow(text_of(name), programs, tmp_path)


@pytest.mark.parametrize(
    "broken",
    [
        "```sh\ngcbench run --task digit --steps 2\n```\n",
        "```sh\nfalse\ntrue\n```\n",
        "```sh\ngcbench help nothing | cat\n```\n",
        "```python\nimport gcbench\n\ngcbench.get_compressor('top')\n```\n",
        "```python\n# mine.py\nx = 1\n```\n\n```python\nimport mine\n\nassert mine.x == 2\n```\n",
        "```sh\ngcbench help | head -1\n```\n\n```text\nManuals, each by `gcbench`:\n```\n",
    ],
    ids=["command", "exit code", "pipe", "python", "saved file", "output"],
)
def test_a_broken_block_fails(broken, programs, tmp_path):
    with pytest.raises(AssertionError, match="line "):
        follow(broken, programs, tmp_path)


def test_a_block_that_is_left_out_has_a_reason_and_others_run(programs, tmp_path):
    text = "<!-- not run: it needs a GPU -->\n```sh\nfalse\n```\n\n```sh\ntouch there\n```\n"
    assert [block.left_out for block in blocks(text)] == ["it needs a GPU", ""]
    follow(text, programs, tmp_path)
    assert (tmp_path / "there").exists()
    with pytest.raises(AssertionError):
        follow(text.replace(": it needs a GPU", ""), programs, tmp_path)


@pytest.mark.parametrize("text", ["```bash\nls\n```\n", "```\nls\n```\n", "```sh\nls\n"])
def test_a_fence_that_would_not_run_is_refused(text):
    with pytest.raises(PageError, match="line 1"):
        list(blocks(text))


@pytest.mark.parametrize("name", NAMES)
def test_blocks_fit_a_terminal_of_80_columns(name):
    lines = [line for block in blocks(text_of(name)) for line in block.text.splitlines()]
    assert [line for line in lines if len(line) > 78] == []  # `gcbench help` pads by one


# ---- generated tables ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in NAMES if GENERATED.search(text_of(name))])
def test_the_generated_tables_are_current(name, programs):
    def run(command: str) -> str:
        done = programs.shell(command, ROOT, SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = text_of(name)
    assert generated(text, run) == text, "run `make docs`"


def test_a_changed_number_is_seen():
    page = "x\n<!-- generated: echo 1.23 -->\n\n1.22\n\n<!-- end -->\ny\n"
    assert generated(page, lambda command: f"{command[5:]}\n") == page.replace("1.22", "1.23")


# ---- what pages name -----------------------------------------------------------------------------


def links(path: Path) -> list[str]:
    text = path.read_text()
    targets = re.findall(r"\]\(([^)#]+)", text)
    return [target for target in targets if not target.startswith("http")]


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_files(name):
    path = ROOT / name
    assert [link for link in links(path) if not (path.parent / link).exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_guides_that_pages_name_exist(name):
    topics = re.findall(r"gcbench help ([a-z-]+)", text_of(name))
    assert set(topics) <= set(helping.guides())


@pytest.mark.parametrize("name", ["README.md", "gcbench/docs/protocol.md"])
def test_a_page_counts_the_committed_rows(name):
    commits = gcbench.load_results(ROOT / "results/reference")["provenance.commit"]
    counts = (int(commits.str.endswith("+").sum()), len(commits))
    (stated,) = re.findall(r"([\d,]+) of (?:the )?([\d,]+) rows", text_of(name))
    assert stated == tuple(f"{count:,}" for count in counts)


def test_the_page_names_all_fields_that_a_row_of_another_program_needs(tmp_path):
    text = text_of("gcbench/docs/reading-results.md")
    needed = re.search(r"A row needs (.*?)\. ", text, re.DOTALL)[1]
    (parts,) = re.findall(r"`wire_bytes` \((.*?)\)", needed, re.DOTALL)
    names = set(re.findall(r"`(\w+)`", needed.replace(parts, "")))
    examples = dict.fromkeys(("task", "collective", "engine", "compressor", "compressor_name"), "x")
    row = {name: examples.get(name, 1) for name in names} | {"config": {}, "test_accuracy": 0.5}
    row |= {"wire_bytes": dict.fromkeys(re.findall(r"`(\w+)`", parts), 1), "compressor": "none"}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    assert len(gcbench.load_results(path)) == 1
    for name in names:
        path.write_text(json.dumps([{key: row[key] for key in row if key != name}]))
        with pytest.raises(GcbenchError):
            gcbench.load_results(path)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 1500


def test_help_lists_the_guides_and_prints_each():
    listed = invoke("help").out
    for topic, title in helping.guides().items():
        assert topic in listed
        assert title in listed
        shown = invoke("help", topic).out
        assert shown.startswith(f"# {title}")
        assert "<!--" not in shown
    wrong = invoke("help", "your-metod")
    assert wrong.code == 2
    assert "your-method" in wrong.err


# ---- where things are ----------------------------------------------------------------------------


def numbered(name: str) -> dict[str, str]:
    return dict(re.findall(r"^(\d+)\. (.+)$", (HERE / name).read_text(), re.MULTILINE))


def test_each_question_has_an_answer_that_is_a_file():
    questions, answers = numbered("questions.txt"), numbered("answers.txt")
    assert list(questions) == list(answers) == [str(number) for number in range(1, 21)]
    files = [ROOT / name for names in answers.values() for name in names.split()]
    assert [str(path) for path in files if not path.is_file()] == []
