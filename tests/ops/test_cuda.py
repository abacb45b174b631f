"""CUDA kernels without a GPU: they compile, their cache holds, their host code checks.

Their bytes are compared in `tests/ops/test_kernels.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from operator import attrgetter

import cusim
import pytest
import torch
from commands import PATIENCE, ROOT
from cusim import on_shim, shim  # noqa: F401  # fixture

from gcbench import ops
from gcbench.core.compressor import Key, Segments
from gcbench.core.errors import GcbenchError
from gcbench.ops import cuda
from gcbench.ops.cuda import compile, launch
from gcbench.ops.sources import cuda_families, kernel_sources

ARCHITECTURES = ("sm_80", "sm_100")
SELFTEST = cusim.HEADER.with_name("selftest.cu")


def _nvrtc() -> str | None:
    """Return why nothing can be compiled here; the environment can make that an error."""
    try:
        compile.nvrtc_version()
        compile._core()
    except GcbenchError as error:
        if os.environ.get("GCBENCH_REQUIRE_NVRTC", "0") != "0":
            raise
        return str(error)
    return None


MISSING = _nvrtc()
needs_nvrtc = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a count of what is compiled."""
    monkeypatch.setenv("GCBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile, "_warned", False)
    compiled: list[tuple[str, str]] = []
    real = compile.compile_family

    def counted(family, arch, **options):
        compiled.append((family, arch))
        return real(family, arch, **options)

    monkeypatch.setattr(compile, "compile_family", counted)
    return tmp_path / "cache" / "kernels", compiled


# ---- compilation ---------------------------------------------------------------------------------


def resources(log: str) -> dict[str, tuple[int, int]]:
    """Return what ptxas says: kernel -> registers, bytes spilled (stored, loaded and stacked)."""
    result = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        stack, stores, loads = re.search(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part
        ).groups()
        registers = re.search(r"Used (\d+) registers", part)[1]
        result[name] = int(registers), int(stack) + int(stores) + int(loads)
    return result


@needs_nvrtc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("family", cuda_families())
def test_kernels_compile_without_spills(family, arch):
    version = compile.nvrtc_version()
    if arch == "sm_100" and version < (12, 8):
        pytest.skip(f"NVRTC {version[0]}.{version[1]} does not know sm_100 yet")
    created = compile.compile_family(family, arch, verbose=True)
    used = resources(created.log)
    for name, (registers, spilled) in used.items():
        print(f"{arch} {family}.{name}: {registers} registers")
        # Registers are given out by the compiler: those of CUDA 12 spill a few bytes.
        assert spilled == 0 or (version < (13,) and spilled < 100), f"{name}: {spilled} bytes"
    assert launch.kernels_of(created.cubin) == sorted(used)
    assert set(used) == set(cusim.kernels(kernel_sources() / f"{family}.cu"))


@needs_nvrtc
def test_a_spill_is_seen(tmp_path, monkeypatch):
    """The test above must be able to fail."""
    (tmp_path / "hungry.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(1024) hungry(float* p) {\n'
        "  float v[200];\n"
        "  for (int i = 0; i < 200; ++i) v[i] = p[i * 32 + threadIdx.x];\n"
        "  __syncthreads();\n"
        "  for (int r = 0; r < 3; ++r)\n"
        "    for (int i = 0; i < 200; ++i) p[i * 32 + threadIdx.x + r] = v[i] * v[199 - i];\n"
        "}\n"
    )
    monkeypatch.setattr(compile, "kernel_sources", lambda: tmp_path)
    log = compile.compile_family("hungry", "sm_90", verbose=True).log
    assert resources(log)["hungry"][1] > 0


@needs_nvrtc
def test_the_shims_own_kernels_are_cuda(tmp_path, monkeypatch):
    for source in (SELFTEST, kernel_sources() / "common.cuh"):
        (tmp_path / source.name).write_bytes(source.read_bytes())
    monkeypatch.setattr(compile, "kernel_sources", lambda: tmp_path)
    cubin = compile.compile_family("selftest", "sm_90").cubin
    assert launch.kernels_of(cubin) == sorted(cusim.kernels(SELFTEST))


@needs_nvrtc
def test_products_and_sums_are_not_contracted(tmp_path, monkeypatch):
    """A fused multiply-add would be one instruction; its absence makes the code longer."""
    (tmp_path / "axpy.cu").write_text(
        'extern "C" __global__ void axpy(float* p) { p[0] = p[1] * p[2] + p[3]; }\n'
    )
    monkeypatch.setattr(compile, "kernel_sources", lambda: tmp_path)
    plain = compile.compile_family("axpy", "sm_90").cubin
    monkeypatch.setitem(compile.OPTIONS, "fma", True)
    assert compile.compile_family("axpy", "sm_90").cubin != plain


@needs_nvrtc
def test_a_fault_in_a_source_is_told_with_its_place(tmp_path, monkeypatch):
    (tmp_path / "broken.cu").write_text('extern "C" __global__ void k() {\n  missing = 1;\n}\n')
    monkeypatch.setattr(compile, "kernel_sources", lambda: tmp_path)
    with pytest.raises(compile.CompileError, match=r'broken.cu\(2\).*"missing" is undefined'):
        compile.compile_family("broken", "sm_90")


@needs_nvrtc
def test_an_architecture_that_nvrtc_does_not_know():
    with pytest.raises(compile.CompileError, match=r"random.cu .*sm_11"):
        compile.compile_family("random", "sm_11")


def test_an_unknown_family_names_the_known_ones():
    with pytest.raises(compile.CompileError, match=r"no kernel file other.cu .*random"):
        compile.compile_family("other", "sm_90")


def test_without_cuda_core_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(compile.CompileError, match=r"pip install 'gcbench\[cuda\]'"):
        compile.compile_family("random", "sm_90")


# ---- the cache -----------------------------------------------------------------------------------


@needs_nvrtc
def test_what_was_compiled_is_kept(cache):
    folder, compiled = cache
    first = compile.cached_cubin("random", "sm_90")
    assert compile.cached_cubin("random", "sm_90") == first
    assert compiled == [("random", "sm_90")]
    assert first.startswith(b"\x7fELF")
    assert len(list(folder.iterdir())) == 1
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]


@needs_nvrtc
@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b"", lambda b: b[:99] + b"x" + b[100:]]
)
def test_a_damaged_entry_is_compiled_again(cache, damage):
    folder, compiled = cache
    first = compile.cached_cubin("random", "sm_90")
    (entry,) = folder.iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert compile.cached_cubin("random", "sm_90") == first
    assert len(compiled) == 2
    assert entry.read_bytes() == whole


@needs_nvrtc
def test_other_options_versions_architectures_and_sources_have_entries_of_their_own(
    tmp_path, monkeypatch
):
    for source in ("random.cu", "common.cuh"):
        (tmp_path / source).write_bytes((kernel_sources() / source).read_bytes())
    monkeypatch.setattr(compile, "kernel_sources", lambda: tmp_path)
    seen = {compile._key("random", "sm_90")}

    def is_new() -> bool:
        key = compile._key("random", "sm_90")
        return key not in seen and not seen.add(key)

    seen.add(compile._key("random", "sm_80"))
    assert len(seen) == 2
    with monkeypatch.context() as patch:
        patch.setitem(compile.OPTIONS, "fma", True)
        assert is_new()
    with monkeypatch.context() as patch:
        patch.setattr(compile, "nvrtc_version", lambda: (99, 9))
        assert is_new()
    assert not is_new()
    for source in ("random.cu", "common.cuh"):
        with (tmp_path / source).open("a") as file:
            file.write("// changed\n")
        assert is_new()


@needs_nvrtc
def test_a_cache_that_cannot_be_written_is_told_once(cache, tmp_path):
    folder, compiled = cache
    folder.parent.write_text("a file where the folder should be")
    with pytest.warns(RuntimeWarning, match=r"GCBENCH_CACHE"):
        compile.cached_cubin("random", "sm_90")
    compile.cached_cubin("random", "sm_90")  # a second warning would be an error
    assert len(compiled) == 2


# ---- launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (3, "argument 1 is int"),
        (0.5, "argument 1 is float"),
        (torch.zeros(4, 4).t(), "argument 1: the tensor is not contiguous"),
    ],
)
def test_arguments_without_a_c_type_are_refused(arg, message):
    with pytest.raises(launch.LaunchError, match=message):
        launch.packed([torch.zeros(1), arg])


@pytest.mark.parametrize(
    ("grid", "block", "shared"),
    [(0, 32, 0), (2**31, 32, 0), ((1, 65536), 32, 0), (1, 1025, 0), (1, (32, 33), 0),
     (1, (1, 1, 65), 0), (1, 0, 0), (1, 32, 48 * 1024 + 1)],
)  # fmt: skip
def test_shapes_out_of_range_are_refused(grid, block, shared):
    with pytest.raises(launch.LaunchError, match="grid"):
        launch.checked_shape(grid, block, shared)
    assert launch.checked_shape((2**31 - 1, 65535), (4, 4, 64), 48 * 1024)[5] == 64


def test_a_tensor_of_the_cpu_has_no_launcher():
    with pytest.raises(launch.LaunchError, match="cpu"):
        launch.launcher("cpu")


@pytest.mark.parametrize(
    "key", [Key(0, 2**32, 0), Key(0, 0, 2**24), Key(0, -1, 0), Key(0, 0, 0, 0, 256)]
)
def test_keys_out_of_range_are_refused(key):
    with pytest.raises(ValueError, match=r"2\^32"):
        ops.random.draws24(key, 5, "cpu")


DEVICE = """
import contextlib, ctypes, types
ctypes.CDLL({library!r}, mode=ctypes.RTLD_GLOBAL)
import torch
torch.cuda.get_device_capability = lambda device: (9, 0)
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_stream = lambda device: types.SimpleNamespace(cuda_stream=0x77)
from gcbench.core.compressor import Key, Segments
from gcbench.ops.cuda import launch
device = launch.launcher(torch.device("cuda", 0))
device.warm(["random", "statistics"])
args = (None, launch.i64(-5), launch.i64(2**40), launch.KeyArgument.of(Key(-1, 2, 3, 2**37)))
device.launch("random", "draws24", (3, 2), 256, args, shared=5)
for words, shared in (("draws24", 1, 256, args), 77), (("other", 1, 256, args), 0), (
    ("draws24", 1, 256, (torch.zeros(1),)), 0
):
    try:
        device.launch("random", *words, shared=shared)
    except launch.LaunchError as error:
        ctypes.CDLL(None).puts(str(error).encode())
ctypes.CDLL(None).fflush(None)
import os
os._exit(0)
"""


@needs_nvrtc
@pytest.mark.skipif(sys.platform != "linux", reason="the driver's library is looked up as on Linux")
def test_what_the_driver_is_asked(tmp_path):
    """On a machine without a driver: a library that notes the calls takes its place."""
    cusim.require_compiler()
    library = tmp_path / "libcuda.so.1"
    command = ["g++", "-xc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, SELFTEST.with_name("driver.c"), "-o", library], check=True)
    done = subprocess.run(
        [sys.executable, "-c", DEVICE.format(library=str(library))],
        cwd=ROOT,
        env={**os.environ, "GCBENCH_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    arguments = f"(nil) -5 {2**40} seed {2**64 - 1:x} offset {2**37}"
    lines = done.stdout.splitlines()
    start = lines.index("load ELF")
    assert lines[start:] == [
        "load ELF",
        "kernel draws24 of 0x10",
        "function of 0x27",
        "load ELF",
        "kernel segment_statistics of 0x10",
        "function of 0x32",
        "kernel tile_statistics of 0x10",
        "function of 0x2f",
        f"launch 0x127 grid 3 2 1 block 256 1 1 shared 5 stream 0x77: {arguments}",
        f"launch 0x127 grid 1 1 1 block 256 1 1 shared 77 stream 0x77: {arguments}",
        "random.cu: draws24 cannot be launched on cuda:0: CUDA_ERROR_INVALID_VALUE",
        "random.cu has no kernel 'other': expected one of draws24",
        "draws24: argument 0 is on cpu: expected cuda:0",
    ]


# ---- what there is -------------------------------------------------------------------------------


def test_the_status_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    available, detail = cuda.status()
    assert not available
    assert detail.endswith("was built without CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no usable NVIDIA GPU" in cuda.status()[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    versions = {"cuda-core": "1.2.2", "nvidia-cuda-nvrtc": "13.0.48"}
    monkeypatch.setattr(cuda, "_version", lambda *names: versions.get(names[0]))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda, "_driver", lambda: "580.65")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    texts = "NVIDIA H200 (sm_90), driver 580.65, cuda-core 1.2.2, NVRTC 13.0.48"
    assert cuda.status() == (True, texts)
    del versions["cuda-core"]
    assert cuda.status() == (False, f"cuda-core is not installed: {compile.INSTALL}")


def test_the_status_raises_nothing(monkeypatch):
    def broken():
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert cuda.status() == (
        False,
        "CUDA fails on this machine: RuntimeError: the driver is too old",
    )


def test_cuda_core_is_not_imported_for_a_status():
    code = (
        "import sys\n"
        "from gcbench import ops\n"
        "from gcbench.ops import cuda\n"
        "cuda.status(); ops.backends()\n"
        "print([name for name in sys.modules if name.startswith('cuda.core')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


# ---- host code -----------------------------------------------------------------------------------


def test_every_file_of_kernels_has_host_code():
    texts = {re.search(r"code of (\w+)\.cu", family.__doc__)[1] for family in cuda.FAMILIES}
    assert texts == set(cuda_families())


def test_what_a_kernel_takes_on_trust_is_checked_before(shim):  # noqa: F811
    """Another dtype or length would be read, or written, outside a buffer."""
    segments, x, key = Segments((0, 64)), torch.zeros(64), Key(1, 2, 3)
    one, words = torch.ones(1), torch.full((4,), 0x55555555, dtype=torch.int32)
    coded = ops.natural.encode(x, key)
    wrong = [
        lambda: ops.statistics.absmax(x[:63], segments),
        lambda: ops.statistics.moments(x.double(), segments),
        lambda: ops.ternary.encode(x, None, one[:0], segments, key),
        lambda: ops.ternary.encode(x, one[:0], one, segments, key),
        lambda: ops.ternary.encode(x, None, one, segments, key, out=words[:3]),
        lambda: ops.ternary.mean([(words, 1)], one, segments, out=x[:63]),
        lambda: ops.ternary.mean([(words, 1)], one.double(), segments),
        lambda: ops.ternary.merge([(words, 1)], 64, out=words[:3]),
        lambda: ops.half.encode(x.double(), torch.float16),
        lambda: ops.half.encode(x, torch.float16, out=x.bfloat16()),
        lambda: ops.half.mean([(x.half(), 1), (x[:63].half(), 1)], ""),
        lambda: ops.half.mean([(x.half(), 1), (x.bfloat16(), 1)], ""),
        lambda: ops.half.decode(x.half(), "", out=x[:63]),
        lambda: ops.int8.mean([(x.char(), one, 1), (x.char()[:63], one, 1)], segments),
        lambda: ops.int8.mean([(x.char(), one, 1), (x.char(), one[:0], 1)], segments),
        lambda: ops.int8.mean([(x.char(), one, 1)], segments, out=x[:63]),
        lambda: ops.levels.mean([(words, one, 1)], "2", 1, "fixed", segments, out=x[:63]),
        lambda: ops.sign.mean([(words[:2], (one,), 1)] * 2, segments, "", out=x[:63]),
        lambda: ops.sign.mean([(words[:2], (one[:0], one), 1)], segments, ""),
        lambda: ops.natural.encode(x, key, out=words),
        lambda: ops.natural.decode(coded, 64, "", out=x[:63]),
    ]
    before = len(shim.launches)
    with on_shim(shim):
        assert torch.equal(ops.ternary.mean([(words, 1)], one, segments), x)
        assert len(shim.launches) == before + 1
        for call in wrong:
            with pytest.raises(ValueError, match="expected"):
                call()
    assert len(shim.launches) == before + 1


@pytest.mark.parametrize("width", [1, 7, 1100])
def test_the_launches_of_a_mean_do_not_depend_on_segments(shim, width):  # noqa: F811
    """Nor on the payloads, up to 64."""
    n = 1100
    segments = Segments.of([(n,)], width)
    scales, codes = torch.ones(len(segments)), torch.zeros(n, dtype=torch.int8)
    bits, levels = (
        ops.packing.pack(torch.zeros(n) > 0, 1),
        ops.packing.pack(torch.full((n,), 14), 4),
    )
    signs = [(bits, (-scales, scales * 0), 1)] * 65
    runs = [
        ("int8.mean", [(codes, scales, 1)] * 65, (segments,), ["int8_mean"]),
        (
            "levels.mean",
            [(levels, scales, 1)] * 65,
            ("max", 7, "fixed", segments),
            ["level_mean_8", "level_check"],
        ),
        ("sign.mean", signs, (segments, ""), ["sign_mean", "sign_check"]),
    ]
    with on_shim(shim):
        for name, payloads, rest, kernels in runs:
            for number in (1, 65):
                before = len(shim.launches)
                attrgetter(name)(ops)(payloads[:number], *rest)
                used = [kernel for _, kernel in shim.launches[before:]]
                assert used == kernels * (1 + number // 65), name


def test_outputs_of_nothing_launch_nothing(shim):  # noqa: F811
    before = len(shim.launches)
    with on_shim(shim):
        out = ops.random.draws24(Key(1, 2, 3, 4), 0, "cpu")
        assert out.shape == (0,)
        assert out.dtype == torch.int32
    assert len(shim.launches) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_kernels_run_in_a_cuda_graph():
    cuda.warm()
    key = Key(1, 2, 3, 4321)
    wanted = ops.random.draws24(key, 5000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.random.draws24(key, 5000, "cuda")
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), wanted)
