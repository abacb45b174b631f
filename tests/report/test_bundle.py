"""Bundles: one file with rows, sources and environment; whether two machines' rows agree."""

from __future__ import annotations

import io
import json
import shutil
import stat
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import BASE, summary, write
from commands import invoke

from gcbench.core import files
from gcbench.core.errors import GcbenchError
from gcbench.report import bundle

MINE = "raise RuntimeError('a source of a bundle was run')\n"


def with_source(folder: Path, text: str = MINE) -> list[Any]:
    """Return runs of a plug-in whose source is `folder`/mine.py."""
    (folder / "mine.py").write_text(text)
    digest = bundle._digest({"mine.py": text.encode()})
    result = {
        "commit": "abc",
        "machine": {"cpu": "one"},
        "plugins": {
            "compressor": {"distribution": "file mine.py", "version": "", "sha256": digest}
        },
    }
    return [summary("mine", seed, 0.9, provenance=result) for seed in range(2)]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    write(folder / "runs", *BASE, *with_source(folder))
    done = invoke("bundle", folder / "runs", "-o", folder / "x.zip", "--source", folder)
    assert done.code == 0, done.err
    return folder


@pytest.fixture
def packed(template: Path, tmp_path: Path) -> Path:
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path / "x.zip"


def test_a_bundle_is_compared_as_its_runs_and_runs_no_source(packed: Path) -> None:
    folder = packed.parent / "runs"
    for words in (["--json"], ["--details"], ["--target", "0.8", "--json"]):
        assert invoke("compare", packed, *words).out == invoke("compare", folder, *words).out
    page = packed.parent / "page.html"
    assert invoke("report", packed, "--output", page).code == 0
    assert "mine" in page.read_text()


def test_a_bundle_has_sources_and_environment_and_equal_runs_give_equal_bytes(packed: Path) -> None:
    contents = bundle.read(packed)
    (source,) = (data for name, data in contents.items() if name.startswith(bundle.SOURCES))
    assert source.decode() == MINE
    assert any(
        one.startswith("torch==") for one in json.loads(contents[bundle.ENVIRONMENT])["packages"]
    )
    again = packed.parent / "again.zip"
    assert invoke("bundle", packed, "-o", again, "--source", packed.parent).code == 0
    assert again.read_bytes() == packed.read_bytes()


def test_a_source_that_is_missing_or_was_edited_is_named(tmp_path: Path) -> None:
    write(tmp_path / "runs", *with_source(tmp_path))
    (tmp_path / "mine.py").write_text(MINE + "\n")
    for words in ([], ["--source", tmp_path]):
        done = invoke("bundle", tmp_path / "runs", "-o", tmp_path / "x.zip", *words)
        assert done.code == 2
        assert "mine.py" in done.err
        assert not (tmp_path / "x.zip").exists()


@pytest.mark.parametrize("package", [True, False])
def test_the_source_of_an_installed_package_is_located_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: bool
) -> None:
    site = tmp_path / "site"
    info = site / "somebodys_methods-1.0.dist-info"  # as an editable install: no list of modules
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: somebodys-methods\nVersion: 1.0\n")
    points = "[gcbench.compressors]\nmine = somebodys.methods:Mine\n"
    sources = {"__init__.py": "", "methods.py": MINE}
    if package:
        (site / "somebodys").mkdir()
        for name, text in sources.items():
            (site / "somebodys" / name).write_text(text)
        (site / "somebodys" / ".#methods.py").symlink_to("author@host.1")  # Emacs, while it edits
    else:
        points, sources = points.replace(".methods", ""), {"somebodys.py": MINE}
        (site / "somebodys.py").write_text(MINE)
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(site)
    digest = bundle._digest({name: text.encode() for name, text in sources.items()})
    origin = {"distribution": "somebodys-methods", "version": "1.0", "sha256": digest}
    run = summary("mine", 0, 0.9, provenance={"plugins": {"compressor": origin}})
    write(tmp_path / "runs", run)
    done = invoke("bundle", tmp_path / "runs", "-o", tmp_path / "x.zip")
    assert done.code == 0, done.err
    names = [name for name in bundle.read(tmp_path / "x.zip") if name.startswith(bundle.SOURCES)]
    assert sorted(names) == sorted(f"{bundle.SOURCES}{digest[:10]}/{name}" for name in sources)


def test_a_source_that_does_not_exist_or_serves_nothing_is_refused(packed: Path) -> None:
    (packed.parent / "helper.py").write_text("")
    for name, reason in (("josé.py", "no such file"), ("helper.py", "of no plug-in")):
        done = invoke("bundle", packed.parent / "runs", "-o", packed.parent / "y.zip",
                      "--source", packed.parent, "--source", packed.parent / name)  # fmt: skip
        assert (done.code, reason in done.err) == (2, True)
    assert not (packed.parent / "y.zip").exists()


def test_a_bundle_needs_a_zip_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "runs", *BASE)
    for output in (tmp_path / "x.tar", tmp_path / "none" / "x.zip"):
        done = invoke("bundle", tmp_path / "runs", "-o", output)
        assert done.code == 2
        assert str(output.parent) in done.err


# ---- archives that are refused -------------------------------------------------------------------

Members = dict[str, bytes]


def archive(members: Members, mode: int = 0, method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as result:
        for name, data in members.items():
            one = zipfile.ZipInfo(name)
            one.external_attr = mode << 16
            result.writestr(one, data, method)
    return buffer.getvalue()


def sealed(members: Members) -> Members:
    """Return the files with a head that lists their digests."""
    import hashlib

    mine = {name: data for name, data in members.items() if name != bundle.HEAD}
    listed = {name: hashlib.sha256(data).hexdigest() for name, data in mine.items()}
    head = files.sealed({"schema": bundle.SCHEMA, "rows": 1, files.FILES: listed})
    return {**mine, bundle.HEAD: json.dumps(head).encode()}


def renamed(name: str) -> Callable[[Members], bytes]:
    return lambda members: archive(sealed({**members, name: b"x"}))


def damaged(members: Members) -> bytes:
    data = bytearray(archive(members))
    data[data.index(b"rows.parquet") + 40] ^= 255
    return bytes(data)


def bad_lzma(members: Members) -> bytes:
    """Return an archive whose first file has options of LZMA that do not exist."""
    data = bytearray(archive(sealed(members), method=zipfile.ZIP_LZMA))
    name = next(iter(sealed(members))).encode()
    data[data.index(name) + len(name) + 4] = 255
    return bytes(data)


def lying(members: Members) -> bytes:
    """Return an archive that declares fewer bytes than it unpacks to."""
    data = archive(sealed({**members, "sources/a/b.py": bytes(10_000)}))
    return data.replace((10_000).to_bytes(4, "little"), (10).to_bytes(4, "little"))


REFUSED: dict[str, Callable[[Members], bytes]] = {
    "parent": renamed("sources/../../evil.py"),
    "absolute": renamed("/tmp/evil.py"),
    "backslash": renamed("sources\\..\\evil.py"),
    "elsewhere": renamed("setup.py"),
    "link": lambda members: archive(sealed(members), stat.S_IFLNK | 0o777),
    "bomb": lambda members: archive(sealed({**members, "sources/a/b.py": bytes(2000)})),
    "lying": lying,
    "many": lambda members: archive(sealed(members | {f"sources/{i}": b"" for i in range(9)})),
    "damaged": damaged,
    "lzma": lambda members: archive(sealed(members), method=zipfile.ZIP_LZMA),
    "bad lzma": bad_lzma,
    "bzip2": lambda members: archive(sealed(members), method=zipfile.ZIP_BZIP2),
    "cut": lambda members: archive(members)[:-30],
    "text": lambda members: b"rows",
    "no head": lambda members: archive({k: v for k, v in members.items() if k != bundle.HEAD}),
    "no rows": lambda members: archive(
        sealed({k: v for k, v in members.items() if k != bundle.ROWS})
    ),
    "edited": lambda members: archive({**members, bundle.ENVIRONMENT: b"{}"}),
    "added": lambda members: archive({**members, "sources/a/b.py": b""}),
    "schema": lambda members: archive({**members, bundle.HEAD: b'{"schema": 2}'}),
    "list": lambda members: archive({**members, bundle.HEAD: b"[]"}),
    "files": lambda members: archive(
        {**members, bundle.HEAD: json.dumps(files.sealed({"schema": 1, "files": 3})).encode()}
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_a_bad_bundle_is_refused(packed: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    members = bundle.read(packed) | {bundle.HEAD: zipfile.ZipFile(packed).read(bundle.HEAD)}
    path = packed.parent / "bad.zip"
    path.write_bytes(archive(sealed(members)))
    assert bundle.read(path), "without the fault it is read"
    monkeypatch.setattr(bundle, "MOST_BYTES", sum(map(len, members.values())) + 1500)
    monkeypatch.setattr(bundle, "MOST_FILES", 10)
    path.write_bytes(REFUSED[fault](members))
    before = set(packed.parent.parent.rglob("*"))
    with pytest.raises(GcbenchError) as error:
        bundle.read(path)
    assert "bad.zip" in str(error.value)
    assert invoke("compare", path).code == 1
    assert set(packed.parent.parent.rglob("*")) == before


# ---- machines ------------------------------------------------------------------------------------


def runs_of(cpu: str, digests: list[str | None], **over: Any) -> list[Any]:
    result = {"commit": "abc", "machine": {"cpu": cpu}, "versions": {"torch": "2"}}
    return [
        {**summary("none", seed, 0.5, provenance=result, **over), "params_sha256": digest}
        for seed, digest in enumerate(digests)
    ]


def test_rows_of_two_machines_agree_by_their_parameters(tmp_path: Path) -> None:
    write(tmp_path / "here", *runs_of("one", ["a", "b", "c", None]))
    write(tmp_path / "there", *runs_of("two", ["a", "x", "c", "d"]), *runs_of("two", ["e"], lr=0.2))
    done = invoke("compare", tmp_path, "--by", "machine")
    assert "4 runs made on more than one of 2 machines: 2 with equal" in done.out.replace("\n", " ")
    rows = invoke("compare", tmp_path, "--by", "machine", "--json").json
    assert [(row["seed"], row["agree"]) for row in rows] == [
        (0, True),
        (1, False),
        (2, True),
        (3, None),
    ]
    chosen = invoke("compare", tmp_path, "--by", "machine", "--where", "seed=1", "--json").json
    assert [row["params_sha256"] for row in chosen] == [["b", "x"]]


def test_a_bundle_keeps_the_runs_of_each_machine_once(tmp_path: Path) -> None:
    """The second machine's runs were left out without a word."""
    write(tmp_path / "here", *runs_of("one", ["a", "b"]))
    write(tmp_path / "there", *runs_of("two", ["a", "x"]))
    first, both = tmp_path / "first.zip", tmp_path / "both.zip"
    assert invoke("bundle", tmp_path / "here", "-o", first).code == 0
    done = invoke("bundle", first, tmp_path / "here", tmp_path / "there", "-o", both)
    assert "4 rows" in done.out + done.err
    rows = invoke("compare", both, "--by", "machine", "--json").json
    assert [row["agree"] for row in rows] == [True, False]
    assert len(invoke("compare", both, "--json").json) == 1


@pytest.mark.parametrize(
    ("digests", "agree"),
    [(["a", "b", None], False), (["a", None, "b"], False), (["a", "a", None], None)],
)
def test_a_copy_without_a_digest_hides_no_difference(
    tmp_path: Path, digests: list[str | None], agree: bool | None
) -> None:
    for cpu, digest in zip(("one", "two", "three"), digests, strict=True):
        write(tmp_path / cpu, *runs_of(cpu, [digest]))
    places = [tmp_path / cpu for cpu in ("one", "two", "three")]
    (row,) = invoke("compare", *places, "--by", "machine", "--json").json
    assert (row["params_sha256"], row["agree"]) == (digests, agree)


def test_copies_of_a_run_count_once(packed: Path) -> None:
    """A folder and its own bundle are the same runs: nothing was repeated."""
    done = invoke("compare", packed.parent / "runs", packed, "--by", "machine")
    assert done.code == 2
    assert "copies of one run count once" in " ".join(done.err.split())


def test_a_second_run_on_an_equal_machine_counts(tmp_path: Path) -> None:
    """Equal processors do not make a copy: the runs started at different times."""
    for name, started in (("here", "2026-01-01"), ("there", "2026-01-02")):
        runs = runs_of("one", ["a", "b"])
        for run in runs:
            run["provenance"] = {**run["provenance"], "started": started}
        write(tmp_path / name, *runs)
    both = tmp_path / "here", tmp_path / "there"
    rows = invoke("compare", *both, tmp_path / "here", "--by", "machine", "--json").json
    assert [row["places"] for row in rows] == [[1, 2], [1, 2]]
    assert all("here" in row["machines"][0] for row in rows)
    assert {row["agree"] for row in rows} == {True}


def test_one_machine_has_nothing_to_agree_with(tmp_path: Path) -> None:
    write(tmp_path / "here", *runs_of("one", ["a", "b"]))
    done = invoke("compare", tmp_path, "--by", "machine")
    assert done.code == 2
    assert "1 machine (one" in done.err


def test_a_flag_that_machines_have_no_use_for_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "here", *runs_of("one", ["a"]))
    write(tmp_path / "there", *runs_of("two", ["a"]))
    for flag in (("--plot", tmp_path / "x.png"), ("--suite", "main"), ("--sort", "wire")):
        refused = invoke("compare", tmp_path, "--by", "machine", *flag)
        assert (refused.code, f"remove {flag[0]}" in refused.err) == (2, True)
