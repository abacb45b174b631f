"""Data sets on disk: locating, downloading, checking and reading the published files.

Files have their official layout, `cifar-10-batches-bin/*.bin` and `mnist/*.gz`, or, if there is
none, ours, `text/tinyshakespeare.txt`, in a folder of the user or in the download cache. Their
SHA-256 is checked on every use. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import sys
import tarfile
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import filelock
import numpy as np
import pooch
import requests
import torch
from torch import Tensor

from gcbench.core.errors import GcbenchError, unknown

TIMEOUT = 30.0
"""Seconds without a response after which a download fails."""

Examples = tuple[Tensor, Tensor]
"""uint8 images (n, channels, height, width) and int64 labels (n,)."""


@dataclass(frozen=True)
class File:
    """A published file: name, size in bytes, and hexadecimal SHA-256."""

    name: str
    size: int
    sha256: str
    published: str = ""
    """Its name at the mirrors, if different."""

    def address(self, mirror: str) -> str:
        """Return the URL of the file at `mirror`."""
        return mirror + (self.published or self.name)

    def fault(self, path: Path) -> str | None:
        """Return a description of the fault of the file at `path`, or None."""
        if not path.is_file():
            return "is missing"
        size = path.stat().st_size
        if size < self.size:
            return f"is truncated: {size:,} of {self.size:,} bytes"
        if size > self.size:
            return f"is too long: {size:,} bytes, expected {self.size:,}"
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != self.sha256:
            return f"has SHA-256 {sha256}, expected {self.sha256}"
        return None


@dataclass(frozen=True)
class Source:
    """A data set: its folder, its files, and their mirrors."""

    folder: str
    files: tuple[File, ...]
    mirrors: tuple[str, ...]
    """URL prefixes of the files' published names, tried in order."""
    archive: File | None = None
    """The tar archive of the folder; None: the files are published separately."""

    @property
    def downloads(self) -> tuple[File, ...]:
        """The files to download."""
        return (self.archive,) if self.archive else self.files


_BATCHES = (
    ("data_batch_1.bin", "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
    ("data_batch_2.bin", "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
    ("data_batch_3.bin", "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
    ("data_batch_4.bin", "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
    ("data_batch_5.bin", "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
    ("test_batch.bin", "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
)
SOURCES = {
    "cifar10": Source(
        folder="cifar-10-batches-bin",
        files=tuple(File(name, 30_730_000, sha256) for name, sha256 in _BATCHES),
        mirrors=("https://www.cs.toronto.edu/~kriz/",),
        archive=File(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ),
    ),
    "mnist": Source(
        folder="mnist",
        files=(
            File(
                "train-images-idx3-ubyte.gz",
                9_912_422,
                "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            File(
                "train-labels-idx1-ubyte.gz",
                28_881,
                "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            File(
                "t10k-images-idx3-ubyte.gz",
                1_648_877,
                "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            File(
                "t10k-labels-idx1-ubyte.gz",
                4_542,
                "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        ),
        mirrors=(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
    ),
    "shakespeare": Source(
        folder="text",
        files=(
            File(
                "tinyshakespeare.txt",
                1_115_394,
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                published="input.txt",
            ),
        ),
        mirrors=(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
        ),
    ),
}
NAMES = tuple(SOURCES)


# ---- finding and fetching ------------------------------------------------------------------------


def cache() -> Path:
    """Return the download cache: GCBENCH_CACHE, or the default of the operating system."""
    return Path(os.environ.get("GCBENCH_CACHE") or pooch.os_cache("gcbench")).expanduser()


def path(name: str, data_dir: Path | None = None) -> Path:
    """Return the folder of the files of `name`, which may not exist yet.

    Raises:
        UsageError: `name` is unknown.
    """
    return (data_dir or cache()) / _source(name).folder


def find(name: str, data_dir: Path | None = None) -> list[Path]:
    """Return the checked paths of the files of `name`; download them if there is no `data_dir`.

    Raises:
        UsageError: `name` is unknown.
        GcbenchError: a file is missing, truncated or has the wrong checksum, or no server can be
            reached.
    """
    source = _source(name)
    if data_dir is None:
        folder = get(name)
    else:
        folder = path(name, data_dir)
        for file in source.files:
            if fault := file.fault(folder / file.name):
                raise GcbenchError(
                    f"{name}: {folder / file.name} {fault}. {_by_hand(source, data_dir)}; or unset "
                    "--data-dir and GCBENCH_DATA to download it automatically."
                )
    return [folder / file.name for file in source.files]


def get(name: str, data_dir: Path | None = None, progress: str = "auto") -> Path:
    """Download missing files of `name` to `data_dir` or the cache, and return their folder.

    `progress`: `bar` displays a progress bar on stderr, `plain` prints the addresses, `none`
    nothing; `auto` is `bar` on a terminal, otherwise `plain`. Invalid files are downloaded again in
    the cache, but never overwritten in `data_dir`.

    Raises:
        UsageError: `name` is unknown.
        GcbenchError: no server can be reached, a downloaded file is invalid, the folder is not
            writable, or a file in `data_dir` is invalid.
    """
    source, root = _source(name), data_dir or cache()
    folder = root / source.folder
    faults = {file: file.fault(folder / file.name) for file in source.files}
    if not any(faults.values()):
        return folder
    if data_dir:
        for file, fault in faults.items():
            if fault and (folder / file.name).exists():
                raise GcbenchError(f"{name}: {folder / file.name} {fault}. Move or delete it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / f".{source.folder}.lock"):
            _fetch_all(name, source, root, progress)
    except OSError as error:
        place = "--data-dir or GCBENCH_DATA" if data_dir else "GCBENCH_CACHE"
        raise GcbenchError(
            f"{name} cannot be stored in {root}: {error.strerror or error}. Set another folder "
            f"with {place}."
        ) from error
    return folder


def _source(name: str) -> Source:
    if name not in SOURCES:
        raise unknown("data set", name, SOURCES)
    return SOURCES[name]


def _by_hand(source: Source, root: Path) -> str:
    """Return instructions to download the files to `root` manually."""
    if source.archive:
        urls = " or ".join(source.archive.address(mirror) for mirror in source.mirrors)
        return f"Download {urls} and unpack it in {root}"
    names = ", ".join(
        f"{file.published} as {file.name}" if file.published else file.name for file in source.files
    )
    return f"Download {names} from {' or '.join(source.mirrors)} into {root / source.folder}"


def _fetch_all(name: str, source: Source, root: Path, progress: str) -> None:
    """Download and unpack missing files, unless another process did while this one waited."""
    folder = root / source.folder
    if not any(file.fault(folder / file.name) for file in source.files):
        return
    into = root if source.archive else folder
    for file in source.downloads:
        try:
            _fetch(file, source.mirrors, into, progress)
        except (requests.RequestException, ValueError) as error:
            raise GcbenchError(
                f"{name}: {file.name} cannot be downloaded ({_reason(error)}). Try again. Or: "
                f"{_by_hand(source, root)}, or to a folder set by --data-dir or GCBENCH_DATA. "
                "`--task digits` needs no download."
            ) from error
    if source.archive:
        _unpack(source, into / source.archive.name, folder)


def _reason(error: Exception) -> str:
    """Return a short reason; the messages of requests are chains of wrapped exceptions."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server returned {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return f"no response within {TIMEOUT:g} s"
    if isinstance(error, requests.RequestException):
        broke = isinstance(error, requests.exceptions.ChunkedEncodingError)
        return "connection lost" if broke else "no connection"
    return "the server has another file: its SHA-256 differs"


def _fetch(file: File, mirrors: tuple[str, ...], into: Path, progress: str) -> None:
    """Download one file to the folder `into`, from the first mirror that provides it."""
    bar = progress == "bar" or (progress == "auto" and sys.stderr.isatty())
    failures: list[Exception] = []
    logger = pooch.get_logger()
    silent, logger.disabled = logger.disabled, bar or progress == "none"
    try:
        for mirror in mirrors:
            try:
                pooch.retrieve(
                    file.address(mirror),
                    known_hash=f"sha256:{file.sha256}",
                    fname=file.name,
                    path=into,
                    downloader=pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT),
                )
            except (requests.RequestException, ValueError) as error:
                failures.append(error)
            else:
                return
    finally:
        logger.disabled = silent
    raise failures[-1]


def _unpack(source: Source, archive: Path, folder: Path) -> None:
    """Extract only the files of the data set from a checked archive, then delete the archive."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with tarfile.open(archive) as tar:
            for file in source.files:
                tar.extract(f"{source.folder}/{file.name}", scratch, filter="data")
        for file in source.files:
            (Path(scratch) / source.folder / file.name).replace(folder / file.name)
    archive.unlink()


# ---- reading -------------------------------------------------------------------------------------


def cifar10(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Return CIFAR-10's 50,000 training and 10,000 test examples, images (n, 3, 32, 32).

    Raises:
        GcbenchError: see `find`.
    """
    batches = [cifar_rows(file) for file in find("cifar10", data_dir)]
    images, labels = zip(*batches[:-1], strict=True)
    return (torch.cat(images), torch.cat(labels)), batches[-1]


def mnist(data_dir: Path | None = None) -> tuple[Examples, Examples]:
    """Return MNIST's 60,000 training and 10,000 test examples, images (n, 1, 28, 28).

    Raises:
        GcbenchError: see `find`.
    """
    files = find("mnist", data_dir)
    train, train_labels, test, test_labels = (idx(file) for file in files)
    return (
        (train.unsqueeze(1), train_labels.long()),
        (test.unsqueeze(1), test_labels.long()),
    )


def shakespeare(data_dir: Path | None = None) -> Tensor:
    """Return the bytes of tinyshakespeare, an ASCII text: uint8 (1,115,394,).

    Raises:
        GcbenchError: see `find`.
    """
    (file,) = find("shakespeare", data_dir)
    return torch.from_numpy(np.fromfile(file, np.uint8))


def cifar_rows(file: Path) -> Examples:
    """Read CIFAR-10's binary format: rows of one label byte and 3x32x32 bytes of an image.

    Raises:
        GcbenchError: the size is not a multiple of a row, or a label is above 9.
    """
    flat = np.fromfile(file, np.uint8)
    if not flat.size or flat.size % 3073:
        raise GcbenchError(
            f"{file} is truncated: {flat.size:,} bytes, expected a multiple of 3,073"
        )
    rows = torch.from_numpy(flat).view(-1, 3073)
    labels = rows[:, 0].long()
    if labels.max() > 9:
        raise GcbenchError(f"{file}: label {int(labels.max())}, expected 0 to 9")
    return rows[:, 1:].reshape(-1, 3, 32, 32), labels


def idx(file: Path) -> Tensor:
    """Read a gzipped idx file of unsigned bytes; return uint8 with the shape in its header.

    The header is two zero bytes, the byte 8 (the type: unsigned byte), the number of axes, and the
    length of each axis as four big-endian bytes.

    Raises:
        GcbenchError: the file is not gzip, not idx, or truncated.
    """
    try:
        with gzip.open(file) as stream:
            content = stream.read()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise GcbenchError(f"{file} is not a complete gzip file: {error}") from error
    axes = content[3] if len(content) > 3 else 0
    if content[:3] != b"\0\0\x08" or not axes or len(content) < 4 + 4 * axes:
        raise GcbenchError(
            f"{file} is not an idx file of unsigned bytes: it starts with {content[:4]!r}"
        )
    start = 4 + 4 * axes
    shape = np.frombuffer(content, ">u4", axes, offset=4).tolist()
    if len(content) - start != (expected := math.prod(shape)):
        raise GcbenchError(
            f"{file} is truncated: {len(content) - start:,} bytes of data, expected {expected:,} "
            f"for shape {shape}"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)
