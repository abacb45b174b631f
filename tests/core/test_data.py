from __future__ import annotations

import gc
import gzip
import hashlib
import io
import logging
import os
import re
import socket
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pooch
import pytest
import torch

from gcbench.core import data
from gcbench.core.errors import GcbenchError, UsageError

# pooch leaves a response open when its connection breaks off.
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed <socket:ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
CONTENT = bytes(range(256)) * 1024


class Server(ThreadingHTTPServer):
    """Serves `files` by name; breaks off once after `cut` bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        self.server.asked.append(name)
        if name not in self.server.files:
            self.send_error(404)
            return
        body = self.server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut])
        self.server.cut = None


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()
    gc.collect(1)  # the open responses end here, not in another test


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("GCBENCH_CACHE", str(folder))
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv(variable.upper(), raising=False)
    return folder


def entry(name: str, content: bytes) -> data.File:
    return data.File(name, len(content), hashlib.sha256(content).hexdigest())


def publish(monkeypatch: pytest.MonkeyPatch, *mirrors: str, content: bytes = CONTENT) -> None:
    """Let the data set `mnist` be one file, a.gz."""
    source = data.Source("mnist", (entry("a.gz", content),), mirrors)
    monkeypatch.setitem(data.SOURCES, "mnist", source)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def test_download_goes_to_the_cache_once(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"] = CONTENT
    assert data.find("mnist") == [cache / "mnist" / "a.gz"]
    assert (cache / "mnist" / "a.gz").read_bytes() == CONTENT
    assert data.get("mnist") == data.path("mnist") == cache / "mnist"
    assert server.asked == ["a.gz"]


def test_a_download_shows_its_progress_as_requested(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from commands import invoke

    messages = io.StringIO()
    monkeypatch.setattr(pooch.get_logger(), "handlers", [logging.StreamHandler(messages)])
    monkeypatch.delenv("GCBENCH_DATA", raising=False)
    publish(monkeypatch, server.url)
    server.files["a.gz"] = CONTENT
    for how in ("none", "plain", "bar", "auto"):
        (cache / "mnist" / "a.gz").unlink(missing_ok=True)
        messages.truncate(0)
        done = invoke("data", "get", "mnist", "--progress", how)
        assert (done.code, done.out) == (0, f"{cache / 'mnist'}\n")
        # auto, without a terminal, is plain
        assert (server.url + "a.gz" in messages.getvalue()) == (how in ("plain", "auto"))
        assert ("100%" in done.err) == (how == "bar")
        again = invoke("data", "get", "mnist", "--progress", how)
        assert (again.out, again.err) == (done.out, ""), "nothing to download, nothing to show"


def test_a_lost_connection_leaves_nothing_and_the_next_attempt_succeeds(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"], server.cut = CONTENT, 100_000
    with pytest.raises(GcbenchError, match=r"a\.gz .*connection lost"):
        data.get("mnist")
    assert list((cache / "mnist").iterdir()) == []
    data.get("mnist")
    assert (cache / "mnist" / "a.gz").read_bytes() == CONTENT


def test_the_next_mirror_is_tried(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, closed_port(), server.url + "gone/", server.url, server.url)
    server.files["a.gz"], server.cut = CONTENT, 100_000
    data.get("mnist")
    assert server.asked == ["gone/a.gz", "a.gz", "a.gz"]
    assert (cache / "mnist" / "a.gz").read_bytes() == CONTENT


@pytest.mark.parametrize(
    "served", [CONTENT[:-1] + b"?", CONTENT + b"?", b"<html>please log in</html>"]
)
def test_wrong_content_is_refused_and_not_kept(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, served: bytes
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"] = served
    with pytest.raises(GcbenchError, match="SHA-256"):
        data.get("mnist")
    assert list((cache / "mnist").iterdir()) == []


def test_damaged_file_in_the_cache_is_fetched_again(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"] = CONTENT
    (cache / "mnist").mkdir(parents=True)
    (cache / "mnist" / "a.gz").write_bytes(CONTENT[:-1] + b"?")
    data.get("mnist")
    assert (cache / "mnist" / "a.gz").read_bytes() == CONTENT


def test_get_fills_a_named_folder_but_overwrites_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"] = CONTENT
    assert data.get("mnist", tmp_path) == tmp_path / "mnist"
    assert data.find("mnist", tmp_path) == [tmp_path / "mnist" / "a.gz"]
    (tmp_path / "mnist" / "a.gz").write_bytes(b"mine")
    with pytest.raises(GcbenchError, match=r"a\.gz .*4 of 262,144 bytes"):
        data.get("mnist", tmp_path)
    assert (tmp_path / "mnist" / "a.gz").read_bytes() == b"mine"


@pytest.mark.parametrize("name", data.NAMES)
def test_without_network_the_message_says_what_to_do(
    name: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = data.SOURCES[name]
    urls = real.mirrors
    dead = data.Source(real.folder, real.files, (closed_port(),) * len(urls), real.archive)
    monkeypatch.setitem(data.SOURCES, name, dead)
    with pytest.raises(GcbenchError) as caught:
        data.find(name)
    message = str(caught.value)
    for part in (
        real.downloads[0].name + " cannot be downloaded (no connection)",
        "Download ",
        dead.mirrors[0],
        str(cache),
        "--data-dir or GCBENCH_DATA",
        "`--task digits` needs no download",
    ):
        assert part in message
    assert "\n" not in message
    assert "Error" not in message


def test_a_file_that_is_published_under_another_name(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = data.SOURCES["shakespeare"]
    (file,) = real.files
    assert (real.folder, file.name, file.address("")) == (
        "text",
        "tinyshakespeare.txt",
        "input.txt",
    )
    content = b"to be, or not"
    named = data.File(file.name, len(content), hashlib.sha256(content).hexdigest(), file.published)
    source = data.Source(real.folder, (named,), (server.url,))
    monkeypatch.setitem(data.SOURCES, "shakespeare", source)
    with pytest.raises(
        GcbenchError, match=r"Download input\.txt as tinyshakespeare\.txt from .*/text"
    ):
        data.find("shakespeare")
    server.files["input.txt"] = content
    assert bytes(data.shakespeare().tolist()) == content
    assert server.asked == ["input.txt"] * 2
    assert [path.name for path in (cache / "text").iterdir()] == ["tinyshakespeare.txt"]


def test_the_published_addresses() -> None:
    assert data.SOURCES["cifar10"].mirrors == ("https://www.cs.toronto.edu/~kriz/",)
    assert [mirror.split("/")[2] for mirror in data.SOURCES["mnist"].mirrors] == [
        "ossci-datasets.s3.amazonaws.com",
        "storage.googleapis.com",
    ]
    (text,) = data.SOURCES["shakespeare"].files
    (mirror,) = data.SOURCES["shakespeare"].mirrors
    place = "karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
    assert text.address(mirror) == f"https://raw.githubusercontent.com/{place}"


def test_server_that_does_not_answer(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "TIMEOUT", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        publish(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}/")
        with pytest.raises(GcbenchError, match=r"within 0\.05 s"):
            data.get("mnist")


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GcbenchError, match=r"cannot be stored in .*with --data-dir or GCBENCH_D"):
        data.get("mnist", tmp_path / "file")
    monkeypatch.setenv("GCBENCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(GcbenchError, match=r"cannot be stored in .*GCBENCH_CACHE"):
        data.get("mnist")


def test_archive_is_unpacked_safely(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in (("set/one.bin", b"1"), ("set/two.bin", b"22"), ("../evil.bin", b"!")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    server.files["set.tar.gz"] = packed.getvalue()
    files = (entry("one.bin", b"1"), entry("two.bin", b"22"))
    archive = entry("set.tar.gz", packed.getvalue())
    source = data.Source("set", files, (server.url,), archive)
    monkeypatch.setitem(data.SOURCES, "cifar10", source)
    assert [file.read_bytes() for file in data.find("cifar10")] == [b"1", b"22"]
    selected = sorted(str(file.relative_to(cache.parent)) for file in cache.parent.rglob("*.*"))
    assert [name for name in selected if not name.endswith(".lock")] == [
        "cache/set/one.bin",
        "cache/set/two.bin",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is missing. Download "),
        (CONTENT[:-1], "is truncated: 262,143 of 262,144 bytes. Download "),
        (CONTENT + b"?", "is too long: 262,145 bytes, expected 262,144. Download "),
        (
            CONTENT[:-1] + b"?",
            "has SHA-256 [0-9a-f]{64}, expected [0-9a-f]{64}. Download ",
        ),
    ],
)
def test_files_in_a_named_folder_are_checked_and_not_downloaded(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    publish(monkeypatch, server.url)
    server.files["a.gz"] = CONTENT
    (tmp_path / "mnist").mkdir()
    if content is not None:
        (tmp_path / "mnist" / "a.gz").write_bytes(content)
    with pytest.raises(GcbenchError, match=r"mnist/a\.gz " + message):
        data.find("mnist", tmp_path)
    assert server.asked == []


def test_unknown_name() -> None:
    expected = re.escape(
        "unknown data set 'mnits'. Did you mean 'mnist'? Known: cifar10, mnist, shakespeare."
    )
    for function in (data.path, data.find, data.get):
        with pytest.raises(UsageError, match=expected):
            function("mnits")


def test_path_touches_nothing(tmp_path: Path, cache: Path) -> None:
    assert data.path("cifar10") == cache / "cifar-10-batches-bin"
    assert data.path("mnist", tmp_path) == tmp_path / "mnist"
    assert not cache.exists()


# ---- reading -------------------------------------------------------------------------------------


def test_cifar_rows_are_label_then_red_green_blue_by_rows(tmp_path: Path) -> None:
    pixels = torch.arange(2 * 3072).remainder(251).to(torch.uint8).view(2, 3072)
    rows = torch.cat([torch.tensor([[7], [0]], dtype=torch.uint8), pixels], 1)
    (tmp_path / "batch.bin").write_bytes(rows.numpy().tobytes())
    images, labels = data.cifar_rows(tmp_path / "batch.bin")
    assert labels.tolist() == [7, 0]
    assert (images.shape, images.dtype) == ((2, 3, 32, 32), torch.uint8)
    # Colour 2, row 5, column 9 of the second image is byte 3072 + 2 * 1024 + 5 * 32 + 9.
    assert images[1, 2, 5, 9] == (3072 + 2 * 1024 + 5 * 32 + 9) % 251


@pytest.mark.parametrize("size", [0, 3072, 3074])
def test_cifar_file_that_is_cut_short(tmp_path: Path, size: int) -> None:
    (tmp_path / "batch.bin").write_bytes(b"\1" * size)
    with pytest.raises(GcbenchError, match=f"{size:,} bytes"):
        data.cifar_rows(tmp_path / "batch.bin")


def test_cifar_label_out_of_range(tmp_path: Path) -> None:
    (tmp_path / "batch.bin").write_bytes(b"\x0a" + b"\0" * 3072)
    with pytest.raises(GcbenchError, match="label 10"):
        data.cifar_rows(tmp_path / "batch.bin")


def test_idx(tmp_path: Path) -> None:
    head = b"\0\0\x08\x03" + b"".join(size.to_bytes(4, "big") for size in (2, 3, 4))
    (tmp_path / "a.gz").write_bytes(gzip.compress(head + bytes(range(24))))
    read = data.idx(tmp_path / "a.gz")
    assert read.dtype == torch.uint8
    assert torch.equal(read, torch.arange(24, dtype=torch.uint8).view(2, 3, 4))


HEAD = b"\0\0\x08\x01\0\0\0\4"


def packed(data: bytes) -> bytes:
    """Compress without the time of day, which would make each collection's tests others."""
    return gzip.compress(data, mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "gzip"),
        (packed(HEAD + b"1234")[:-9], "gzip"),
        (packed(b""), "not an idx file"),
        (packed(b"\0\0\x0d\x01\0\0\0\4" + b"1234"), "not an idx file"),
        (packed(b"\0\0\x08\x02\0\0\0\4"), "not an idx file"),
        (packed(HEAD + b"123"), r"3 bytes of data, expected 4 for shape \[4\]"),
        (packed(HEAD + b"12345"), r"5 bytes of data, expected 4 for shape \[4\]"),
        (
            packed(b"\0\0\x08\x04" + b"\0\1\0\0" * 4),
            "0 bytes of data, expected 18,446,744,073,709,551,616",
        ),
    ],
)
def test_idx_refuses(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.gz").write_bytes(content)
    with pytest.raises(GcbenchError, match=message):
        data.idx(tmp_path / "a.gz")


REAL = os.environ.get("GCBENCH_DATA")


@pytest.mark.skipif(not REAL, reason="GCBENCH_DATA names no folder with the published files")
def test_the_published_files() -> None:
    assert REAL is not None
    (images, labels), (test, test_labels) = data.cifar10(Path(REAL))
    assert images.shape == (50_000, 3, 32, 32)
    assert test.shape == (10_000, 3, 32, 32)
    assert labels.bincount().tolist() == [5000] * 10
    assert test_labels.bincount().tolist() == [1000] * 10
    assert test_labels[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]
    mean = images.numpy().mean((0, 2, 3)) / 255
    assert mean.tolist() == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)

    (images, labels), (test, test_labels) = data.mnist(Path(REAL))
    assert images.shape == (60_000, 1, 28, 28)
    assert test.shape == (10_000, 1, 28, 28)
    assert labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert test_labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    assert images.float().mean().item() / 255 == pytest.approx(0.1307, abs=1e-4)

    text = data.shakespeare(Path(REAL))
    assert (text.shape, text.dtype) == ((1_115_394,), torch.uint8)
    assert bytes(text[:14].tolist()) == b"First Citizen:"
    assert len(text.unique()) == 65
