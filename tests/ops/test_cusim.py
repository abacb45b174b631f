"""The shim does what CUDA does: its own kernels, against numpy and plain Python."""

from __future__ import annotations

import ctypes

import cusim
import numpy as np
import pytest
import torch

from gcbench.ops.cuda.launch import LaunchError, f32, f64, i32, i64, u32, u64

RNG = np.random.default_rng(5)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    cusim.require_compiler()
    return cusim.Shim(tmp_path_factory.mktemp("selftest"), cusim.HEADER.parent)


@pytest.fixture(params=[False, True], ids=["ascending", "descending"])
def run(built, request):
    """Return a function that launches a kernel of selftest.cu."""
    built.reverse = request.param
    return lambda *words, **named: built.launch("selftest", *words, **named)


def test_collectives_are_found_in_the_text():
    result = cusim.kernels(cusim.HEADER.with_name("selftest.cu"))
    plain = {"index", "arguments", "atomics", "bits", "floats", "trap", "made_one", "made_two"}
    assert {name for name, collective in result.items() if not collective} == plain
    assert {name for name, collective in result.items() if collective} == {
        "sums", "reversed", "reversed_without_barrier", "garbage", "shuffles", "votes", "partial",
        "deadlock", "wrong_mask",
    }  # fmt: skip


def test_every_thread_of_every_block_runs_once(run):
    out = torch.zeros(2 * 3 * 4 * 8 * 3 * 2, dtype=torch.int64)
    run("index", (2, 3, 4), (8, 3, 2), (out, i64(out.numel())))
    assert out.tolist() == list(range(out.numel()))


def test_arguments_arrive_with_their_types(run):
    class Mixed(ctypes.Structure):
        _fields_ = (("small", ctypes.c_int8), ("wide", f64), ("last", i32))

    out = torch.zeros(10, dtype=torch.float64)
    settings = (i32(-7), i64(-(2**40)), u32(2**32 - 1), u64(2**52), f32(0.5), f64(0.1))
    run("arguments", 1, 1, (out, *settings, Mixed(-3, 2.5, 9), None))
    assert out.tolist() == [-7, -(2**40), 2**32 - 1, 2**52, 0.5, 0.1, -3, 2.5, 9, 1]


@pytest.mark.parametrize("args", [(), (None, i64(1), None), (None, i32(1))])
def test_arguments_of_other_sizes_are_refused(run, args):
    with pytest.raises(LaunchError, match=r"given, the kernel has 8 8$"):
        run("index", 1, 1, args)


def test_an_unknown_kernel_is_refused(run):
    with pytest.raises(LaunchError, match="nothing: no such kernel"):
        run("nothing", 1, 1, ())


def test_shared_memory_and_barriers(run):
    x = torch.randint(-1000, 1000, (5, 128), dtype=torch.int32)
    out = torch.zeros(5, dtype=torch.int64)
    run("sums", 5, 128, (x, out))
    assert torch.equal(out, x.sum(1))


@pytest.mark.parametrize("threads", [1, 33, 100, 1024])
def test_dynamic_shared_memory(run, threads):
    x = torch.arange(3 * threads, dtype=torch.int32).view(3, threads)
    out = torch.zeros_like(x)
    run("reversed", 3, threads, (x, out), shared=4 * threads)
    assert torch.equal(out, x.flip(1))


def test_a_missing_barrier_shows_in_each_order_elsewhere(run, built):
    x = torch.arange(1, 65, dtype=torch.int32)
    out = torch.zeros_like(x)
    run("reversed_without_barrier", 1, 64, (x, out), shared=256)
    right = (out == x.flip(0)).tolist()
    assert right == ([True] * 32 + [False] * 32 if built.reverse else [False] * 32 + [True] * 32)


def test_shared_memory_starts_as_garbage_in_each_block(run):
    out = torch.zeros(64, dtype=torch.int32)
    run("garbage", 2, 32, (out,))
    assert set(out.tolist()) == {0xA5A5A5A5 - 2**32}


def test_shuffles(run):
    x = torch.from_numpy(RNG.integers(-(2**62), 2**62, 64))
    out = torch.zeros(7, 64, dtype=torch.int64)
    run("shuffles", 1, 64, (x, out))
    rows = x.view(2, 32)
    lane = torch.arange(32)
    group, rank = lane // 8 * 8, lane % 8
    sources = [
        lane ^ 5,
        torch.where(lane + 3 < 32, lane + 3, lane),
        torch.where(lane >= 3, lane - 3, lane),
        lane * 7 % 32,
        torch.where(rank + 3 < 8, lane + 3, lane),
        lane ^ 2,
        group + 1,
    ]
    for row, source in zip(out, sources, strict=True):
        assert torch.equal(row.view(2, 32), rows[:, source])


def test_votes(run):
    x = torch.from_numpy(RNG.integers(0, 40, 64).astype(np.int32))
    x[40] = 7
    x[:32] %= 7
    out = torch.zeros(5, 64, dtype=torch.int64).int()
    run("votes", 1, 64, (x, out))
    received = out.numpy().astype(np.int64) & 0xFFFFFFFF
    for warp in (0, 1):
        part = x[32 * warp : 32 * warp + 32].tolist()
        here = slice(32 * warp, 32 * warp + 32)
        assert set(received[0, here]) == {sum((v & 1) << i for i, v in enumerate(part))}
        assert set(received[1, here]) == {(7 in part) | all(v < 32 for v in part) << 1}
        same = [sum((w % 3 == v % 3) << i for i, w in enumerate(part)) for v in part]
        assert received[2, here].tolist() == same
    assert set(received[3]) == {int((x & 1).sum())}
    assert set(received[4]) == {2}


def test_lanes_that_have_ended_are_not_waited_for(run):
    out = torch.full((3, 64), -1, dtype=torch.int32)
    run("partial", 1, 64, (out,))
    lane = torch.arange(64)
    quarter = lane // 8 * 8
    assert torch.equal(out[0].long(), 8 * quarter + 28)
    left = lane % 32 < 16
    assert torch.equal(out[1].long(), torch.where(left, 0xAAAA, -1))
    assert torch.equal(out[2].long(), torch.where(left, 0xFFFF, -1))


def test_atomics(run, built):
    x = torch.from_numpy(RNG.integers(1, 2**20, 96).astype(np.int32))
    out = torch.tensor([0, 0, 2**31 - 1, 0, 0], dtype=torch.int32)
    wide = torch.zeros(2, dtype=torch.int64)
    run("atomics", 3, 32, (x, out, wide))
    assert out[:3].tolist() == [int(x.sum()), int(x.max()), int(x.min())]
    assert out[3] == np.bitwise_or.reduce(x.numpy())
    assert out[4] - 1 == x[31 if built.reverse else 0]  # the first thread's
    assert wide.tolist() == [int(x.sum()) << 20, int(x.max()) << 32]


def test_integer_intrinsics(run):
    n = 40
    x = RNG.integers(0, 2**32, n, dtype=np.uint32)
    x[:4] = 0, 1, 2**31, 2**32 - 1
    out = torch.zeros(9, n, dtype=torch.int32)
    run("bits", 1, n, (torch.from_numpy(x.view(np.int32)), out, i32(n)))
    received = out.numpy().view(np.uint32)
    for i, v in enumerate(int(value) for value in x):
        inverse, shift, text = v ^ 0xFFFFFFFF, i & 31, f"{v:032b}"
        both = inverse << 32 | v
        byte = [both >> 8 * k & 255 for k in range(8)]
        signed = v - 2**32 if v >> 31 else v
        assert received[:, i].tolist() == [
            text.count("1"),
            text[::-1].find("1") + 1,
            text.find("1") % 33 if v else 32,
            int(text[::-1], 2),
            both >> shift & 0xFFFFFFFF,
            (both << shift >> 32) & 0xFFFFFFFF,
            v * 0x9E3779B9 >> 32,
            byte[4] | byte[0] << 8 | byte[6] << 16 | byte[2] << 24,
            (min(v, 1000) + max(signed, -5)) % 2**32,
        ]


def test_float_intrinsics(run):
    x = RNG.standard_normal(32).astype(np.float32) * np.float32(100)
    y = RNG.standard_normal(32).astype(np.float32)
    x[:6] = np.nan, np.inf, -np.inf, 3e9, -3e9, 2.5
    n = len(x)
    out, whole = torch.zeros(5, n), torch.zeros(2, n, dtype=torch.int32)
    run("floats", 1, n, (torch.from_numpy(x), torch.from_numpy(y), out, whole, i32(n)))
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        wanted = [
            (wide * y + 1).astype(np.float32),  # the product is exact, the sum within half an ulp
            x / y,
            np.sqrt(np.abs(x)),
            (wide + y.astype(np.float64) * 3).astype(np.float32),
            np.fmin(x, y),
        ]
    np.testing.assert_allclose(out[0].numpy(), wanted[0], rtol=2.0**-23)
    for received, want in zip(out[1:].numpy(), wanted[1:], strict=True):
        np.testing.assert_array_equal(received, want)
    assert whole[0, :6].tolist() == [0, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 2]
    assert whole[0, 6:].tolist() == np.rint(x[6:]).astype(int).tolist()
    assert np.array_equal(whole[1].numpy(), y.view(np.int32))


def test_threads_that_wait_at_different_barriers_are_reported(run):
    with pytest.raises(LaunchError, match=r"at different barriers: 0:block 1:warp"):
        run("deadlock", 1, 64, ())
    test_dynamic_shared_memory(run, 33)  # and the next launch is sound


def test_a_mask_without_the_caller_is_reported(run):
    with pytest.raises(LaunchError, match=r"leaves out the lane .*block 0,0,0 thread 0,0,0"):
        run("wrong_mask", 1, 32, ())


def test_a_trap_is_reported(run):
    run("trap", 3, 4, (i32(7),))
    with pytest.raises(LaunchError, match=r"__trap \(block 2,0,0 thread"):
        run("trap", 3, 4, (i32(2),))


def test_kernels_that_a_macro_makes(run):
    out = torch.zeros(1, dtype=torch.int32)
    run("made_two", 1, 1, (out,))
    assert out.item() == 2
