"""The page of `gcbench report`: what it shows, that it stands alone, that its tables sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import ROOT, invoke
from test_compare import BASE, summary, write

from gcbench.reporting import analysis as measuring
from gcbench.reporting.analysis import Analysis, Shown, Table

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Tables as lists of rows of cells, ids, links, addresses; elements must nest."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.items: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if "href" in given else []
        self.sources += [given["src"]] if "src" in given else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "li":
            self.items.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        elif "li" in self.open:
            self.items[-1] += data


def analysed() -> Analysis:
    return Analysis(
        kind="test",
        settings={"a": 1},
        command="gcbench test --a 1",
        provenance=measuring.provenance(),
        conclusions=["Nothing was found & all is <well>."],
        tables=[
            Table(
                name="rows",
                title="Times",
                shown=[
                    Shown(field="name", heading="name"),
                    Shown(field="s", heading="ms", scale=1e3),
                ],
                rows=[{"name": "a<b", "s": 0.5}, {"name": "failed", "s": None}],
            )
        ],
    )


def recorded(name: str, seed: int, accuracy: float | None, **over):
    command = f"gcbench run --compressor {name} --seed {seed}"
    machine = {"cpu": "a cpu", "isa": "AVX", "cores": 2}
    provenance = {"command": command, "machine": machine, "versions": {"torch": "2.13"}}
    return summary(name, seed, accuracy, provenance=provenance, **over)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "runs",
        *(recorded("none", seed, value) for seed, value in enumerate((0.9, 0.92))),
        recorded("good", 0, 0.91),
        recorded("bad", 0, None, test_loss=None),
        recorded("none", 0, 0.7, task="mnist"),
    )
    measuring.save(analysed(), tmp_path / "analyses")
    return tmp_path


def test_the_page_shows_runs_analyses_and_their_commands(folder: Path) -> None:
    path = folder / "page.html"
    told = invoke("report", folder, "--output", path, "--title", "A & B", "--json").json
    text = path.read_text()
    counts = {"runs": 5, "analyses": 1, "kernel_timings": 0}
    assert told == {"page": str(path), "bytes": len(text.encode()), **counts}
    page = Page(text)
    assert "<title>A &amp; B</title>" in text
    digits = page.tables[0]
    where = {name: digits[0].index(name) for name in ("method", "n", "command")}
    rows = {row[where["method"]]: row for row in digits[1:]}
    assert list(rows) == ["none", "bad", "good"]
    assert "91.00 ± 1.41" in rows["none"]
    assert "+1.00" in rows["good"]
    assert rows["bad"][where["n"]] == "0 (1 failed)"
    assert rows["none"][where["command"]].split() == ["[1]", "[2]"]
    commands = [item for item in page.items if item.startswith("gcbench run")]
    assert commands[:2] == [f"gcbench run --compressor none --seed {seed}" for seed in (0, 1)]
    analysis = page.tables[-1]
    assert analysis == [["name", "ms"], ["a<b", "500"], ["failed", "-"]]
    assert "gcbench test --a 1" in page.items
    assert "Nothing was found &amp; all is &lt;well&gt;." in text
    assert "does not know how to draw it" in text


def test_the_page_stands_alone(folder: Path) -> None:
    """Every address is inside the page, and every link leads somewhere."""
    path = folder / "page.html"
    invoke("report", folder, "--output", path)
    text = path.read_text()
    page = Page(text)
    assert len(page.sources) == 2
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert page.links
    assert all(link.startswith("#") and link[1:] in page.ids for link in page.links)
    assert len(set(page.ids)) == len(page.ids)
    assert not re.search(r"https?://|@import|url\(", text)


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    write(tmp_path, *BASE[:1], recorded("<script>alert(1)</script>", 0, 0.5))
    invoke("report", tmp_path, "--output", tmp_path / "x.html")
    assert "<script>alert" not in (tmp_path / "x.html").read_text()


def test_a_target_is_told(folder: Path) -> None:
    invoke("report", folder / "runs", "--output", folder / "x.html", "--target", "0.5")
    assert "to 50 %" in (folder / "x.html").read_text()


def test_what_cannot_be_reported(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "file").write_text("")
    for words, code, said in [
        ([folder / "empty"], 2, "no finished run and no analysis"),
        ([folder / "gone"], 2, "does not exist"),
        ([folder, "--output", folder / "x.pdf"], 2, "ends in .html"),
        ([folder, "--output", folder / "gone" / "x.html"], 2, "is no folder"),
    ]:
        refused = invoke("report", *words)
        assert (refused.code, said in refused.err) == (code, True), refused.err
    head = next(folder.glob("analyses/*/analysis.json"))
    head.write_text(head.read_text().replace('"version": 1', '"version": 7'))
    refused = invoke("report", folder, "--output", folder / "x.html")
    assert (refused.code, "schema 7" in refused.err) == (1, True)
    assert not (folder / "x.html").exists()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_headings_sort_their_table(folder: Path) -> None:
    """Numbers by value, first up then down; what is no number last, both times."""
    path = folder / "page.html"
    invoke("report", folder, "--output", path)
    page = path.read_text()
    place = Page(page).tables[0][0].index("accuracy %")
    for clicks, order in [(1, ["none", "good", "bad"]), (2, ["good", "none", "bad"])]:
        press = f"document.querySelectorAll('thead')[0].rows[0].cells[{place}].firstChild.click();"
        script = f"<script>{press * clicks}</script></body>"
        path.write_text(page.replace("91.00 ±", "9.00 ±").replace("</body>", script))
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
        profile = f"--user-data-dir={folder / 'profile'}"
        done = subprocess.run(
            [str(BROWSER), profile, *words], capture_output=True, text=True, timeout=60, check=True
        )
        table = Page(done.stdout).tables[0]
        method = table[0].index("method")
        assert [row[method] for row in table[1:]] == order


def test_json_of_a_summary_is_as_good_as_a_folder(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(BASE))
    invoke("report", tmp_path / "rows.json", "--output", tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "not recorded: " in text
    assert "92.00 ± 2.00" in text


# -- files -----------------------------------------------------------------------------------------


def reported(*words: object) -> tuple[str, Page]:
    path = Path(str(words[0])).with_name("page.html")
    done = invoke("report", *words[1:], "--output", path)
    assert done.code == 0, done.err
    return done.err, Page(path.read_text())


def committed(name: str) -> dict:
    return json.loads((ROOT / "results" / name).read_text())


def test_committed_files_are_shown(tmp_path: Path) -> None:
    """Analyses with a picture where it can be drawn, kernel timings, and runs, on one page."""
    names = ("figure5", "histogram-cifarnet", "kernels", "mnist-lenet")
    said, page = reported(tmp_path / "x", *(ROOT / "results" / f"{name}.json" for name in names))
    timings = committed("kernels.json")["rows"]
    assert f"4 runs, 2 analyses, {len(timings)} kernel timings" in said
    assert {link[1:].rpartition("-")[0] for link in page.links} >= {
        "figure5",
        "histogram-cifarnet",
        "kernels",
    }
    assert len(set(page.ids)) == len(page.ids)
    assert len(page.sources) == 2  # of the runs and of Fig. 5
    text = (tmp_path / "page.html").read_text()
    assert text.count("No picture: its file leaves out what it is drawn from") == 1
    assert "make bench" in page.items
    assert committed("histogram-cifarnet.json")["command"] in page.items

    bars = {table["name"]: table for table in committed("figure5.json")["tables"]}["bars"]["rows"]
    panels = [table for table in page.tables if table[0][0] == "GPUs"]
    assert sum(len(panel) - 1 for panel in panels) == len(bars)
    last = dict(zip(panels[-1][0], panels[-1][-1], strict=True))
    assert (last["GPUs"], last["method"]) == (str(bars[-1]["gpus"]), bars[-1]["method"])

    kernels = [table for table in page.tables if table[0][0] == "op"]
    assert sum(len(table) - 1 for table in kernels) == len(timings)
    row = next(row for row in kernels[-1] if row[:2] == ["copy_", "torch"])
    measured = next(
        r for r in timings if (r["op"], r["size"], r["threads"]) == ("copy_", "25e6", 2)
    )
    assert float(row[2]) == pytest.approx(1e3 * measured["seconds"], rel=0.01)


def test_a_file_is_as_good_as_the_folder_and_counts_once(folder: Path) -> None:
    """The copy with more tables is shown; one of another time is named and left out."""
    whole = measuring.document(measuring.load(next((folder / "analyses").iterdir())))
    part = {**whole, "tables": []}
    for name, content in (("whole", whole), ("part", part)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    for places in (["whole.json"], ["part.json", "analyses"], ["analyses", "part.json"]):
        said, page = reported(folder / "x", *(folder / place for place in places))
        assert page.tables == [[["name", "ms"], ["a<b", "500"], ["failed", "-"]]]
        assert ": 1 analyses" in said
        assert "twice" not in said
    whole["provenance"]["started"] = "2001-01-01"
    (folder / "old.json").write_text(json.dumps(whole))
    said, page = reported(folder / "x", folder / "analyses", folder / "old.json")
    assert "found twice, made at different times" in said
    assert len(page.tables) == 1


def test_files_of_something_else_are_refused(folder: Path) -> None:
    (head,) = folder.glob("analyses/*/analysis.json")
    whole = measuring.document(measuring.load(head.parent))
    del whole["tables"][0]["rows"]
    for name, content, code, said in [
        ("rowless.json", json.dumps(whole), 1, "the table `rows` has no rows"),
        ("other.json", '{"a": 1}', 2, "holds no run, analysis or kernel timings"),
        ("number.json", "3", 2, "holds no run, analysis or kernel timings"),
        ("broken.json", '{"a":', 2, "cannot be read as JSON"),
        ("notes.md", "# Notes", 2, "print with --json"),
        ("new.json", json.dumps({**whole, "version": 7}), 1, "schema 7"),
        ("list.json", "[{}]", 1, "row 1: schema None"),
    ]:
        (folder / name).write_text(content)
        refused = invoke("report", folder / "runs", folder / name, "--output", folder / "x.html")
        assert (refused.code, name in refused.err, said in refused.err) == (code, True, True)
    refused = invoke("report", head.with_name("rows.json"))
    assert (refused.code, "one table of an analysis; name its folder" in refused.err) == (2, True)
    refused = invoke("compare", ROOT / "results/figure5.json")
    assert (refused.code, "`gcbench report` shows analyses" in refused.err) == (2, True)
    assert not (folder / "x.html").exists()
    _, page = reported(folder / "x", head)  # with its tables beside it
    assert len(page.tables) == 1


def test_long_tables_scroll(tmp_path: Path) -> None:
    analysis = analysed()
    for count, expected in ((40, False), (41, True)):
        analysis.tables[0].rows = [{"name": str(i), "s": 1.0} for i in range(count)]
        (tmp_path / "a.json").write_text(json.dumps(measuring.document(analysis)))
        reported(tmp_path / "x", tmp_path / "a.json")
        assert ('class="wide long"' in (tmp_path / "page.html").read_text()) is expected


def test_a_page_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    write(tmp_path / "runs", summary("none", 0, 0.9))
    done = invoke("report", tmp_path / "runs", "--output", tmp_path / "page.html")
    assert done.code == 1
    assert f"gcbench: cannot write {tmp_path}/page.html: Is a directory; name another" in done.err
