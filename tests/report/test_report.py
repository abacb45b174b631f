"""The page of `gcbench report`: what it shows, that it stands alone, that its tables sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from builders import BASE, summary, write
from commands import ROOT, invoke

from gcbench.report import analysis as measuring
from gcbench.report import sections
from gcbench.report import summary as page_summary
from gcbench.report.analysis import Analysis, Shown, Table
from gcbench.report.rendering import Column
from gcbench.report.tables import PAYLOAD
from gcbench.results import rows as stored

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def browse(page: Path, *words: str, width: int = 1280) -> str:
    """Open a page in a headless browser and return what it prints."""
    quiet = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
    quiet += ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    mine = (f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},900")
    command = [str(BROWSER), *quiet, *mine, *words, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def with_script(page: Path, script: str, width: int = 1280) -> Page:
    """Return the page as it stands after a script of ours ran at its end."""
    probe = page.with_name("probed.html")
    probe.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    return Page(browse(probe, "--dump-dom", width=width))


class Page(HTMLParser):
    """Tables as lists of rows of cells, ids, links, addresses; elements must nest."""

    VOID = ("meta", "img", "link", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.items: list[str] = []
        self.title = ""
        self.headings: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        options = dict(attrs)
        self.ids += [options["id"]] if "id" in options else []
        self.links += [options["href"]] if "href" in options else []
        self.sources += [options["src"]] if "src" in options else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "li":
            self.items.append("")
        elif tag in ("h2", "h3", "h4"):
            self.headings.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data
        elif "li" in self.open:
            self.items[-1] += data
        elif {"h2", "h3", "h4"} & set(self.open):
            self.headings[-1] += data
        elif "title" in self.open:
            self.title += data

    def accuracy(self, place: int = 0) -> list[list[str]]:
        """Return a table of accuracies that follows the summary."""
        return [table for table in self.tables if "method" in table[0] and PAYLOAD in table[0]][
            place
        ]


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


DRAW = sections._picture


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put empty pictures on the page: to draw them takes longer than the rest of it."""
    monkeypatch.setattr(sections, "_picture", lambda draw: "data:image/svg+xml;base64,")


@pytest.fixture
def pictures(no_pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the pictures."""
    monkeypatch.setattr(sections, "_picture", DRAW)


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


@pytest.mark.usefixtures("pictures")
def test_the_page_shows_runs_analyses_and_their_commands(folder: Path) -> None:
    path = folder / "page.html"
    message = invoke("report", folder, "--output", path, "--title", "A & B", "--json").json
    text = path.read_text()
    counts = {"runs": 5, "analyses": 1, "kernel_timings": 0}
    assert message == {"page": str(path), "bytes": len(text.encode()), **counts}
    page = Page(text)
    assert "<title>A &amp; B</title>" in text
    digits = page.accuracy()
    assert digits[0][:4] == ["method", "accuracy %", "vs none", PAYLOAD]
    where = {name: digits[0].index(name) for name in ("method", "n", "command")}
    rows = {row[where["method"]]: row for row in digits[1:]}
    assert list(rows) == ["none", "bad", "good"]
    assert "91.00 ± 1.41" in rows["none"]
    assert "+1.00" in rows["good"]
    assert rows["bad"][where["n"]] == "0 (1 failed)"
    assert rows["none"][where["command"]].split() == ["[1]", "[2]"]
    commands = [item for item in page.items if item.startswith("gcbench run")]
    assert commands[:2] == [f"gcbench run --compressor none --seed {seed}" for seed in (0, 1)]
    analysis = next(table for table in page.tables if table[0][0] == "name")
    assert analysis == [["name", "ms"], ["a<b", "500"], ["failed", "-"]]
    assert "gcbench test --a 1" in page.items
    assert "Nothing was found &amp; all is &lt;well&gt;." in text
    assert "does not know how to draw it" in text


@pytest.mark.usefixtures("pictures")
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
    for words, code, text in [
        ([folder / "empty"], 2, "no finished run and no analysis"),
        ([folder / "gone"], 2, "does not exist"),
        ([folder, "--output", folder / "x.pdf"], 2, "ends in .html"),
        ([folder, "--output", folder / "gone" / "x.html"], 2, "is not a folder"),
    ]:
        refused = invoke("report", *words)
        assert (refused.code, text in refused.err) == (code, True), refused.err
    trial = recorded("none", 0, None)
    trial |= {"validation_accuracy": 0.5, "validation_loss": 0.5}
    trial["config"] |= {"test": False, "holdout": 100}
    trials = write(folder / "trials", trial)
    refused = invoke("report", trials, "--output", folder / "x.html")
    assert (refused.code, "only trials" in refused.err) == (2, True)
    assert invoke("report", trials, folder / "analyses", "--output", folder / "y.html").code == 0
    head = next(folder.glob("analyses/*/analysis.json"))
    head.write_text(head.read_text().replace('"version": 1', '"version": 7'))
    refused = invoke("report", folder, "--output", folder / "x.html")
    assert (refused.code, "schema 7" in refused.err) == (1, True)
    assert not (folder / "x.html").exists()


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(folder: Path) -> None:
    rows = [summary("none", 7, 0.5), {**summary("wrong", 0, 0.5), "workers": 0}]
    mixed = folder / "mixed.json"
    mixed.write_text(json.dumps(rows))
    page = folder / "page.html"
    done = invoke("report", folder / "runs", folder / "analyses", mixed, "--output", page)
    assert done.code == 1
    assert "mixed.json, row 2: `workers`" in done.err
    assert "good" in page.read_text()
    assert "6 runs" in done.err
    mixed.write_text(json.dumps(rows[1:]))
    page.unlink()
    assert invoke("report", mixed, "--output", page).code == 1
    assert not page.exists(), "nothing is left to show"


@needs_browser
def test_headings_sort_their_table(folder: Path) -> None:
    """Numbers by value, the best first, then the worst; other cells last, both times."""
    path = folder / "page.html"
    invoke("report", folder, "--output", path)
    page = path.read_text()
    path.write_text(page.replace('data-key="91.0">91.00 ±', 'data-key="9.0">9.00 ±'))
    place = Page(path.read_text()).accuracy()[0].index("accuracy %")
    find = "[...document.querySelectorAll('#digits table')][0].tHead.rows[0]"
    for clicks, order in [(1, ["good", "none", "bad"]), (2, ["none", "good", "bad"])]:
        press = f"{find}.cells[{place}].firstChild.click();"
        table = with_script(path, press * clicks).accuracy()
        method = table[0].index("method")
        assert [row[method] for row in table[1:]] == order


def test_what_a_column_sorts_by() -> None:
    """Sizes are bytes, signs and marks are ignored, and names with digits are text."""
    texts = ["16M", "64K", "1G", "+1.25 [0, 2]", "~3", "1,000 / 30", "0 (1 failed)", "≤ 2", "5 min"]
    result = [sections.sort_key(text) for text in texts]
    assert result == [2**24, 2**16, 2**30, 1.25, 3, 1000, 0, 2, 5]
    assert sections.sort_key("-") is None
    assert sections.keys(Column("size", ["16M", "-", "failed"])) == [2**24, None, None]
    assert sections.keys(Column("method", ["topk ratio=0.1", "none"])) is None
    assert sections.keys(Column("layer", ["1", "conv2"])) is None
    ends = {"accuracy %": "high", "median ms": "low", "busbw GB/s": "high", "method": "low"}
    assert {heading: sections.best(Column(heading, [])) for heading in ends} == ends
    assert sections.best(Column("ratio", [], "low")) == "low"


def measured(*frames: tuple[Path, int]) -> list[list[int]]:
    """Return for each page at a width its inner and scrolling width and where accuracies end, px.

    A window has a least width, a frame in it has none; all that is folded is open.
    """
    script = """
        document.title = [...document.querySelectorAll("iframe")].map(frame => {
          const view = frame.contentWindow, page = view.document;
          for (const one of page.querySelectorAll("details")) one.open = true;
          const heading = [...page.querySelectorAll("#digits th")].find(
            cell => cell.textContent.startsWith("accuracy"));
          return [view.innerWidth, page.documentElement.scrollWidth,
            Math.ceil(heading.getBoundingClientRect().right)].join(" ");
        }).join(";");"""
    views = "".join(
        f"<iframe src='{page.name}' style='width: {width}px; height: 900px; border: 0'></iframe>"
        for page, width in frames
    )
    path = frames[0][0].with_name("frames.html")
    path.write_text(f"<title></title><body onload='{{ {script} }}'>{views}</body>")
    dom = browse(path, "--allow-file-access-from-files", "--dump-dom", width=1400)
    return [[int(word) for word in one.split()] for one in Page(dom).title.split(";")]


@needs_browser
@pytest.mark.usefixtures("pictures")
def test_nothing_overflows_and_the_accuracy_is_in_view(folder: Path) -> None:
    """Long names, many columns, a picture: the page is as wide as the window."""
    long = "a-method-of-somebody-with-a-very-long-name-that-nobody-wants-to-read-in-full"
    write(
        folder / "more", *(recorded(long, seed, 0.9, workers=w) for seed in (0, 1) for w in (2, 4))
    )
    names = ("links.json", "bandwidth.json", "kernels.json", "reference/terngrad-figure3.parquet")
    files = [ROOT / "results" / name for name in names]
    path = folder / "page.html"
    assert invoke("report", folder, *files, "--output", path).code == 0
    broken = folder / "broken.html"
    text = path.read_text().replace("<main>", "<main><p style='min-width: 2000px'>x</p>")
    broken.write_text(text)  # the check can fail
    *pages, wide = measured((path, 1280), (path, 390), (broken, 390))
    for width, (inner, scrolls, right) in zip((1280, 390), pages, strict=True):
        assert inner == width
        assert scrolls <= width
        assert right <= width
    assert wide[1] > 390


@needs_browser
def test_the_page_becomes_a_pdf_whose_timings_stay_folded(folder: Path) -> None:
    """What is folded is not printed: a long table costs no pages."""
    analysis = analysed()
    pages = []
    for count in (sections.LONG, 2000):
        analysis.tables[0].rows = [{"name": str(i), "s": 1.0} for i in range(count)]
        (folder / "a.json").write_text(json.dumps(measuring.document(analysis)))
        reported(folder / "x", folder / "runs", folder / "a.json")
        pdf = folder / f"{count}.pdf"
        browse(folder / "page.html", f"--print-to-pdf={pdf}")
        content = pdf.read_bytes()
        assert content.startswith(b"%PDF-")
        pages.append(len(re.findall(rb"/Type\s*/Page[^s]", content)))
    assert pages[1] <= pages[0]
    assert pages[0] >= 2


@needs_browser
def test_filters_hide_rows_of_other_methods_and_tasks(folder: Path) -> None:
    path = folder / "page.html"
    invoke("report", folder, "--output", path)
    act = """
        form.elements.method.value = "goo, non"; form.elements.task.value = "digits";
        form.dispatchEvent(new Event("input", {bubbles: true}));
        const seen = [...document.querySelectorAll("#part-accuracy tr[data-method]")].filter(
          row => row.offsetParent !== null).map(row => row.cells[0].textContent.trim());
        document.title = seen.join(" ") + "; " + form.querySelector("output").textContent;"""
    shown, _, text = with_script(path, act).title.partition("; ")
    assert shown.split() == ["none", "good"]
    assert re.fullmatch(r"\d+ of \d+ rows of methods", text)


@needs_browser
def test_nothing_of_a_third_party_runs(folder: Path) -> None:
    """Markup and scripts in every text that a row brings: names, settings, commands, machines."""
    evil = "\"'></script><img src=x onerror=\"document.title='ran'\"><script>document.title='ran'"
    row = recorded("evil", 0, 0.5, compressor=f"E(a={evil!r})", options={"a": evil})
    row["compressor_name"] = row["task"] = row["config"]["task"] = evil
    row["config"]["optimizer"] = evil
    row["provenance"] |= {"command": evil, "machine": {"cpu": evil}, "times": evil}
    (folder / "theirs.json").write_text(json.dumps([row, recorded("none", 0, 0.7)]))
    analysis = analysed()
    analysis.kind = analysis.command = evil
    analysis.conclusions = [evil]
    analysis.tables[0].title = analysis.tables[0].rows[0]["name"] = evil
    (folder / "a.json").write_text(json.dumps(measuring.document(analysis)))
    done = invoke(
        "report", folder / "theirs.json", folder / "a.json", "--output", folder / "p.html"
    )
    assert done.code == 0, done.err
    page = with_script(folder / "p.html", "")
    assert page.title == "gcbench report"
    assert with_script(folder / "p.html", "document.title = 'ran'").title == "ran"


def test_the_summary_stands_first_and_timings_last(folder: Path) -> None:
    write(folder / "short", recorded("none", 3, 0.1, steps=2))
    timings = ROOT / "results/kernels.json"
    _, page = reported(folder / "x", folder, timings)
    order = ["Summary", "What was run", "The front", "Findings", "Accuracy", "digits", "Analyses"]
    order += ["Timings", "Times: digits", "Times: digits, short runs", "Words"]
    assert [heading for heading in page.headings if heading in order] == order
    what = page.tables[0]
    assert [row[0] for row in what[1:]] == ["digits", "mnist"]
    front = page.tables[1]
    assert [row[:3] for row in front[1:]] == [
        ["none", "91.00 ± 1.41", "-"],
        ["good", "91.00", "+1.00"],
    ]
    text = (folder / "page.html").read_text()
    assert "1 short runs are shown for their times alone" in text
    assert "digits: runs diverged of bad." in text
    assert "so that no difference has an interval" in text
    assert "10.00" not in {row[1] for row in page.accuracy()}  # of two steps


def test_short_runs_of_a_suite_of_mine_have_their_times(tmp_path: Path) -> None:
    runs = [stored.row(recorded("none", seed, 0.5, steps=2), [], "mine/1") for seed in (0, 1)]
    stored.write(tmp_path / "rows.parquet", runs)
    _, page = reported(tmp_path / "x", tmp_path / "rows.parquet")
    assert "Times: digits, short runs" in page.headings


def test_findings_call_nothing_worse_without_an_interval(tmp_path: Path) -> None:
    from gcbench.report import compare
    from gcbench.results import reader

    def text(name: str, *rows: object) -> list[str]:
        runs = reader.load([write(tmp_path / name, *rows)])
        return page_summary.findings(sections.Compared("t", "t", runs, compare.rows(runs)))

    single = text("a", *BASE, summary("x", 0, 0.1))
    assert "no difference has an interval" in single[0]
    worse = [summary("x", seed, value) for seed, value in enumerate((0.80, 0.82, 0.84))]
    near = [summary("y", seed, value) for seed, value in enumerate((0.90, 0.93, 0.93))]
    result = text("b", *BASE, *worse, *near)
    assert result[0] == (
        "t: rows with an interval: 2; worse than `none` by it: 1; better: 0 (3 seeds: wide "
        "intervals)."
    )
    assert "fewest bytes among the rows that are not worse by their interval: y" in result[1]


def test_times_that_are_not_quoted_or_of_two_machines_are_not_shown(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write(tmp_path / "a", recorded("none", 0, 0.9), recorded("x", 0, 0.9))
    not_quoted = recorded("x", 0, 0.9)
    not_quoted["provenance"]["times"] = "other work ran beside"
    for rows, shown, reason in (
        ([recorded("x", 0, 0.9)], True, ""),
        ([not_quoted], True, "of 1 of 2 rows are left out for their author"),
        ([recorded("x", 0, 0.9) | {"provenance": {"machine": {"cpu": "b"}}}], False, "2 machines"),
    ):
        folder = tmp_path / str(len(reason))
        write(folder, recorded("none", 0, 0.9), *rows)
        invoke("report", folder, "--output", page)
        text = page.read_text()
        assert ("Times: digits" in text) is shown
        assert reason in text
        if shown and reason:
            times = next(table for table in Page(text).tables if "step\nms" in table[0])
            cells = {row[0]: row[times[0].index("step\nms")] for row in times[1:]}
            assert cells == {"none": "50.0", "x": "-"}


def test_rows_of_a_parquet_file_are_reported_with_their_suite(tmp_path: Path) -> None:
    """A folder of files of rows has a section for each suite, with ranks where it has tiers."""
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("main-language", "terngrad-table1"):
        shutil.copy(ROOT / f"results/reference/{name}.parquet", folder)
    _, page = reported(tmp_path / "x", folder)
    for name in ("main-language", "terngrad-table1"):
        assert any(heading.startswith(f"{name}: ") for heading in page.headings)
    assert "rank" in page.accuracy()[0]


def test_the_section_of_a_suite_has_no_rows_of_another_version(tmp_path: Path) -> None:
    reference, older = ROOT / "results/reference/terngrad-table1.parquet", tmp_path / "old.parquet"
    changes = {"suite": "terngrad-table1/0", "test_accuracy": 0.11}
    stored.write(older, [{**row, **changes} for row in stored.read(reference)])
    messages, page = reported(tmp_path / "x", older, reference, "--suite", "terngrad-table1")
    assert "12 rows of version 0" in messages
    assert "same config and seed" not in messages
    assert {row[1] for row in page.accuracy()[1:]} == {
        *("66.59 ± 0.32", "62.71 ± 0.28", "46.78 ± 0.19", "44.28 ± 0.23"),
    }


@pytest.mark.usefixtures("pictures")
def test_a_suite_of_two_budgets_has_the_picture_of_the_larger_one(tmp_path: Path) -> None:
    every = stored.read(ROOT / "results/reference/main.parquet")
    long = [row for row in every if row["seed"] == 0 and row["compressor_name"] in ("none", "qsgd")]
    assert {row["steps"] for row in long} == {2000}
    short = [
        {**row, "steps": 300, "config": {**row["config"], "steps": 300}}
        for row in long
        if row["compressor_name"] == "none"
    ]
    stored.write(tmp_path / "rows.parquet", [*short, *long])
    _, page = reported(tmp_path / "x", tmp_path / "rows.parquet")
    (place,) = (i for i, name in enumerate(page.accuracy()[0]) if name == "steps")
    assert {row[place] for row in page.accuracy()[1:]} == {"300", "2000"}
    assert len(page.sources) == 1
    assert "The picture has the rows of steps=2000." in (tmp_path / "page.html").read_text()


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


@pytest.mark.usefixtures("pictures")
def test_committed_files_are_shown(tmp_path: Path) -> None:
    """Analyses with a picture where it can be drawn, kernel timings, and runs, on one page."""
    names = ("links.json", "histogram-cifarnet.json", "kernels.json")
    rows = ROOT / "results/reference/terngrad-figure3.parquet"
    message, page = reported(tmp_path / "x", *(ROOT / "results" / name for name in names), rows)
    timings = committed("kernels.json")["rows"]
    assert f"24 runs, 2 analyses, {len(timings):,} kernel timings" in message
    assert {name.rpartition("-")[0] for name in page.ids} >= {
        "links",
        "histogram-cifarnet",
        "kernels",
    }
    assert len(set(page.ids)) == len(page.ids)
    assert len(page.sources) == 2  # of the runs and of the links
    assert page.headings.index("Timings") > max(map(page.headings.index, ["Accuracy", "Analyses"]))
    text = (tmp_path / "page.html").read_text()
    assert text.count("No picture: its file leaves out what it is drawn from") == 1
    assert "make bench" in page.items
    assert committed("histogram-cifarnet.json")["command"] in page.items

    (methods,) = committed("links.json")["tables"]
    panels = [table for table in page.tables if table[0][:2] == ["method", "collective"]]
    assert sum(len(panel) - 1 for panel in panels) == len(methods["rows"])
    assert panels[-1][-1][0] == methods["rows"][-1]["method"]

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
        text, page = reported(folder / "x", *(folder / place for place in places))
        assert page.tables == [[["name", "ms"], ["a<b", "500"], ["failed", "-"]]], places
        assert ": 1 analysis" in text
        assert "twice" not in text
    whole["provenance"]["started"] = "2001-01-01"
    (folder / "old.json").write_text(json.dumps(whole))
    text, page = reported(folder / "x", folder / "analyses", folder / "old.json")
    assert "found twice, made at different times" in text
    assert len(page.tables) == 1


def test_files_of_something_else_are_refused(folder: Path) -> None:
    (head,) = folder.glob("analyses/*/analysis.json")
    whole = measuring.document(measuring.load(head.parent))
    del whole["tables"][0]["rows"]
    for name, content, code, text in [
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
        assert (refused.code, name in refused.err, text in refused.err) == (code, True, True)
        assert (folder / "x.html").exists() == (name == "list.json")  # the valid runs have a page
    refused = invoke("report", head.with_name("rows.json"))
    assert (refused.code, "one table of an analysis; name its folder" in refused.err) == (2, True)
    refused = invoke("compare", ROOT / "results/links.json")
    assert (refused.code, "`gcbench report` shows analyses" in refused.err) == (2, True)
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
