"""The page of `gcbench report`: what it shows, that it stands alone, that its tables sort."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from commands import invoke
from test_compare import BASE, summary, write

from gcbench.measure import analysis as measuring
from gcbench.measure.analysis import Analysis, Shown, Table

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
    assert told == {"page": str(path), "bytes": len(text.encode()), "runs": 5, "analyses": 1}
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
