"""Bit streams: Elias omega codes by hand, both forms of QSGD against a slow reader, corruption."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gcbench import ops
from gcbench.core.errors import PayloadError
from gcbench.ops import bitstream, native

BY_HAND = {
    1: "0",
    2: "10 0",
    3: "11 0",
    4: "10 100 0",
    7: "10 111 0",
    8: "11 1000 0",
    15: "11 1111 0",
    16: "10 100 10000 0",
    31: "10 100 11111 0",
    32: "10 101 100000 0",
    100: "10 110 1100100 0",
    1000: "11 1001 1111101000 0",
    65535: "11 1111 1111111111111111 0",
    65536: "10 100 10000 10000000000000000 0",
    2**31: "10 100 11111 10000000000000000000000000000000 0",
}
# The fixture that chooses the backend holds for all examples of a test.
quick = settings(
    deadline=None,
    max_examples=60,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def omega(k: int) -> str:
    """The recursion of the definition, on strings."""
    code = "0"
    while k > 1:
        digits = f"{k:b}"
        code, k = digits + code, len(digits) - 1
    return code


def words_of(bits: str) -> list[int]:
    """The words of a stream as unsigned numbers, most significant bit first, zeros at the end."""
    bits += "0" * (-len(bits) % 32)
    return [int(bits[i : i + 32], 2) for i in range(0, len(bits), 32)]


def tensor(unsigned: list[int]) -> torch.Tensor:
    return torch.tensor([word - 2**32 * (word >> 31) for word in unsigned], dtype=torch.int32)


def unsigned(words: torch.Tensor) -> list[int]:
    assert words.dtype == torch.int32
    assert words.dim() == 1
    return [word % 2**32 for word in words.tolist()]


def dense(codes: list[int]) -> str:
    signs = ["", "0", "1"]  # of zero, positive and negative codes
    return "".join(omega(abs(c) + 1) + signs[(c > 0) - (c < 0)] for c in codes)


def sparse(codes: list[int]) -> str:
    places = [i for i, c in enumerate(codes) if c]
    text, last = omega(len(places) + 1), -1
    for i in places:
        text += omega(i - last) + ("1" if codes[i] < 0 else "0") + omega(abs(codes[i]))
        last = i
    return text


def read(form: str, words: torch.Tensor, n: int, levels: int) -> torch.Tensor:
    reader = ops.bitstream.omega_dense_read if form == "dense" else ops.bitstream.omega_sparse_read
    return reader(words, n, levels)


def write(form: str, codes: torch.Tensor, levels: int) -> torch.Tensor:
    writer = (
        ops.bitstream.omega_dense_write if form == "dense" else ops.bitstream.omega_sparse_write
    )
    return writer(codes, levels)


@pytest.fixture(autouse=True, params=["reference", "cpu"])
def backend(request):
    """Every test with plain torch and with the native kernels, if there are any."""
    if not native.status()[0] and request.param == "cpu":
        pytest.skip(native.status()[1])
    with ops.using(request.param):
        yield request.param


@pytest.fixture
def tiny_chunks(monkeypatch):
    """Chunks of one word, shorter than one code, and blocks of three codes."""
    monkeypatch.setattr(bitstream, "_CHUNK", 32)
    monkeypatch.setattr(bitstream, "BLOCK", 3)


def test_omega_codes_by_hand():
    values = torch.tensor(list(BY_HAND))
    codes, lengths = ops.bitstream.omega_codes(values)
    expected = [code.replace(" ", "") for code in BY_HAND.values()]
    assert [f"{c:0{n}b}" for c, n in zip(codes.tolist(), lengths.tolist(), strict=True)] == expected
    assert [omega(k) for k in BY_HAND] == expected
    assert lengths.tolist()[:9] == [1, 3, 3, 6, 6, 7, 7, 11, 11]
    assert lengths.tolist()[-1] == 43


def test_all_omega_codes_of_a_table():
    values = torch.arange(1, 3000)
    codes, lengths = ops.bitstream.omega_codes(values)
    joined = [f"{c:0{n}b}" for c, n in zip(codes.tolist(), lengths.tolist(), strict=True)]
    assert joined == [omega(k) for k in values.tolist()]


@pytest.mark.parametrize("value", [0, -1, 2**31 + 1])
def test_numbers_without_a_code_are_refused(value):
    with pytest.raises(ValueError, match="1 to 2\\^31"):
        ops.bitstream.omega_codes(torch.tensor([1, value]))


def test_bit_order_by_hand():
    """The first code's first bit is the first word's most significant one."""
    codes, lengths = torch.tensor([0b101, 0, 0b1]), torch.tensor([3, 28, 1])
    assert unsigned(ops.bitstream.write_codes(codes, lengths)) == [0xA0000001]
    across = ops.bitstream.write_codes(torch.tensor([0, 0b11]), torch.tensor([31, 2]))
    assert unsigned(across) == [0x00000001, 0x80000000]
    assert ops.bitstream.write_codes(codes[:0], lengths[:0]).tolist() == []
    assert ops.bitstream.write_codes(codes[:0], lengths[:0]).dtype == torch.int32


@quick
@given(
    st.lists(st.integers(0, 63).flatmap(lambda n: st.tuples(st.integers(0, 2**n - 1), st.just(n))))
)
def test_write_codes_is_a_concatenation(pairs):
    codes = torch.tensor([c for c, _ in pairs], dtype=torch.int64)
    lengths = torch.tensor([n for _, n in pairs], dtype=torch.int64)
    text = "".join(f"{c:0{n}b}" if n else "" for c, n in pairs)
    assert unsigned(ops.bitstream.write_codes(codes, lengths)) == words_of(text)


numbers = st.integers(0, 31).flatmap(lambda n: st.integers(max(1, 2**n - 2), 2**n + 2))


@quick
@given(st.lists(numbers.filter(lambda k: k <= 2**31), max_size=80))
def test_omega_codes_against_strings(values):
    """Values around all powers of two up to 2^31."""
    words = ops.bitstream.write_codes(
        *ops.bitstream.omega_codes(torch.tensor(values, dtype=torch.int64))
    )
    assert unsigned(words) == words_of("".join(map(omega, values)))


@pytest.mark.usefixtures("tiny_chunks")
def test_codes_longer_than_a_chunk():
    codes = [0] * 9000 + [-32767] + [0] * 70000 + [5, 0, -1]
    for form, text in (("dense", dense(codes)), ("sparse", sparse(codes))):
        words = write(form, torch.tensor(codes), 32767)
        assert unsigned(words) == words_of(text)
        if form == "sparse":  # 79,000 codes in chunks of one word take too long in the dense form
            assert read(form, words, len(codes), 32767).tolist() == codes


def test_dense_form_by_hand():
    """Zero "0"; one "100" and its sign; two "110"; three "101000"."""
    codes = torch.tensor([0, 1, -2, 3, 0, 0, -1])
    text = "0100011011010000001001"
    assert unsigned(ops.bitstream.omega_dense_write(codes, 3)) == words_of(text) == [0x46D02400]
    assert ops.bitstream.omega_dense_read(tensor([0x46D02400]), 7, 3).tolist() == codes.tolist()


def test_sparse_form_by_hand():
    """Three nonzeros: Elias(4); then distance, sign and size of each."""
    codes = torch.tensor([0, 1, 0, 0, 0, -2, 3, 0, 0])
    text = "10100010000101000110000110"
    assert unsigned(ops.bitstream.omega_sparse_write(codes, 3)) == words_of(text) == [0xA2146180]
    assert ops.bitstream.omega_sparse_read(tensor([0xA2146180]), 9, 3).tolist() == codes.tolist()


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("levels", [1, 2, 7, 127, 32767])
def test_forms_against_strings(form, levels):
    """Dense, rare, all and no nonzeros; sizes around those of words."""
    generator = torch.Generator().manual_seed(levels)
    for n, share in itertools.product((0, 1, 2, 31, 32, 33, 500), (0.0, 0.02, 0.5, 1.0)):
        size = torch.randint(1, levels + 1, (n,), generator=generator)
        sign = 1 - 2 * torch.randint(0, 2, (n,), generator=generator)
        codes = size * sign * (torch.rand(n, generator=generator) < share)
        text = dense(codes.tolist()) if form == "dense" else sparse(codes.tolist())
        words = write(form, codes.int(), levels)
        assert unsigned(words) == words_of(text)
        assert torch.equal(read(form, words, n, levels), codes.int())


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_many_chunks(form):
    """300,000 codes: several chunks and every alignment; too many for strings."""
    generator = torch.Generator().manual_seed(1)
    codes = (torch.randn(300_000, generator=generator) * 4).round().int().clamp(-9, 9)
    words = write(form, codes, 9)
    assert torch.equal(read(form, words, len(codes), 9), codes)
    assert torch.equal(read(form, write(form, codes * 0, 9), len(codes), 9), codes * 0)


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_tiny_chunks_change_nothing(form):
    generator = torch.Generator().manual_seed(2)
    codes = (torch.randn(700, generator=generator) * 300).int() * (torch.arange(700) % 3 == 0)
    words = write(form, codes, 2000)
    text = dense(codes.tolist()) if form == "dense" else sparse(codes.tolist())
    assert unsigned(words) == words_of(text)
    assert torch.equal(read(form, words, 700, 2000), codes)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("levels", [1, 2, 14, 15, 30, 31, 127, 128, 129, 255, 256, 257, 32767])
def test_the_largest_codes_alone(form, levels):
    """They are the longest, of which fewest are written at once."""
    for gap in (1, 255, 256):
        codes = torch.zeros(1000, dtype=torch.int32)
        codes[::gap] = levels
        codes[2 * gap :: 3 * gap] *= -1
        words = write(form, codes, levels)
        text = dense(codes.tolist()) if form == "dense" else sparse(codes.tolist())
        assert unsigned(words) == words_of(text)
        assert torch.equal(read(form, words, 1000, levels), codes)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize("levels", [3, 20, 300])
def test_codes_beyond_the_levels_are_refused(form, levels):
    for code in (-levels - 1, levels + 1, 2**31 - 1):
        with pytest.raises(ValueError, match=f"-{levels} to {levels}"):
            write(form, torch.tensor([0, code, 1]), levels)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_codes_of_64_bits_are_not_cut(form):
    codes = torch.tensor([1, 2**32 + 1, 0])
    with pytest.raises(ValueError, match="-3 to 3"):
        write(form, codes, 3)
    codes[1] = -3
    assert torch.equal(write(form, codes, 3), write(form, codes.int(), 3))


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_the_longest_codes_fill_the_room(form, monkeypatch):
    """And no word beyond it is written; a code out of range is seen wherever it stands."""
    codes, rooms = torch.full((80_003,), -1, dtype=torch.int32), []
    wanted = write(form, codes, 1)

    def guarded(inputs, dtype, numel, device):
        rooms.append(torch.full((numel + 8,), 0x5A5A5A5A, dtype=torch.int32))
        return rooms[-1][:numel]

    with monkeypatch.context() as patch:
        patch.setattr(bitstream, "output", guarded)
        assert torch.equal(write(form, codes, 1), wanted)
    assert (rooms[0][-8:] == 0x5A5A5A5A).all()
    assert torch.equal(read(form, wanted, len(codes), 1), codes)
    for place in (0, 50_000, 80_002):
        wrong = codes.clone()
        wrong[place] = 2
        with pytest.raises(ValueError, match="-1 to 1"):
            write(form, wrong, 1)


def test_distances_beyond_the_end_write_nothing_there(monkeypatch):
    words = write("sparse", torch.arange(40_000).remainder(3).int(), 3)
    zeros, whole = torch.zeros, []

    def guarded(n, **options):
        whole.append(zeros(n + 64, **options))
        return whole[-1][:n]

    monkeypatch.setattr(bitstream.torch, "zeros", guarded)
    with pytest.raises(PayloadError, match="index 39998 of 39990 codes"):
        read("sparse", words, 39_990, 3)
    assert all((tensor[-64:] == 0).all() for tensor in whole)


@pytest.mark.parametrize("form", ["dense", "sparse"])
def test_reading_leaves_the_words_alone(form):
    words = write(form, torch.tensor([0, -3, 1]), 3)
    selected = words.clone()
    read(form, words, 3, 3)
    assert torch.equal(words, selected)


@pytest.mark.parametrize(
    ("form", "n", "levels", "bits", "message"),
    [
        ("dense", 40, 3, "0" * 32, "8 of 40 codes"),
        ("dense", 1, 3, "", "1 of 1 codes"),
        ("dense", 0, 3, "0", "to bit 0 "),
        ("dense", 3, 3, "0" * 3 + "1", "nonzero"),
        ("dense", 3, 3, "0" * 34, "to bit 3 "),
        ("dense", 3, 2, "00" + omega(4) + "0", "number up to 3"),
        ("dense", 3, 2, "1" * 96, "number up to 3"),
        ("dense", 11, 1, "0" * 10 + "1" * 22, "number up to 2"),
        ("dense", 8, 1, "1000" * 7 + "0001" + "0", "64 bits.* to bit 29 "),
        ("dense", 11, 1, "0" * 3 + "1001" * 7 + "1", "32 bits.* to bit 35 "),
        ("sparse", 5, 3, "", "to bit 1 "),
        ("sparse", 5, 3, omega(7), "number up to 6"),
        ("sparse", 5, 3, "1" * 32, "number up to 6"),
        ("sparse", 5, 3, omega(2) + omega(6) + "0" + omega(1), "number up to 5"),
        ("sparse", 5, 3, omega(3) + (omega(3) + "0" + omega(1)) * 2, "index 5 of 5"),
        ("sparse", 5, 3, omega(2) + omega(5) + "0" + omega(4), "number up to 3"),
        ("sparse", 5, 3, omega(2) + omega(5) + "0" + omega(3) + "1", "nonzero"),
        ("sparse", 5, 3, "0" * 33, "to bit 1 "),
        ("sparse", 5, 3, "0" * 9000, "to bit 1 "),
        ("dense", 0, 3, "0" * 9000, "to bit 0 "),
        ("sparse", 99, 3, omega(100), "lacks"),
    ],
)
def test_corrupt_streams_are_refused(form, n, levels, bits, message):
    with pytest.raises(PayloadError, match=message):
        read(form, tensor(words_of(bits)), n, levels)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize(("levels", "share"), [(1, 0.5), (9, 0.1), (300, 0.9)])
def test_long_streams_tell_what_is_wrong_alike(form, levels, share, backend):
    """What is said is of the first thing that is wrong."""
    n, generator = 40_000, torch.Generator().manual_seed(levels)
    sign = 1 - 2 * torch.randint(0, 2, (n,), generator=generator)
    size = torch.randint(1, levels + 1, (n,), generator=generator) * sign
    codes = size * (torch.rand(n, generator=generator) < share)
    words = write(form, codes, levels)
    places = [*range(2, 32, 3), *torch.randint(0, 32 * len(words), (12,), generator=generator)]
    streams = [(words, n - 9, levels), (words, n + 9, levels), (words, n, 1), (words[:-900], n, 9)]
    for place in map(int, places):
        flipped = words.clone()
        flipped[place // 32] ^= 1 << (31 - place % 32)
        streams.append((flipped, n, levels))

    def output(*stream):
        try:
            return read(form, *stream).tolist()
        except PayloadError as error:
            return str(error)

    for stream in streams:
        with ops.using("reference"):
            wanted = output(*stream)
        result = output(*stream)
        # The definition looks for the end of the stream before it looks at the numbers.
        assert result == wanted or ("lacks" in wanted and "number up to" in result)


@pytest.mark.parametrize("value", [2**31 + 1, 2**32 - 1, 2**32, 2**33 + 5, 2**63, 2**2000])
def test_larger_numbers_are_refused(value):
    """Codes of more than 2^31, and of 33 digits and more, also behind other codes."""
    for form, before, most in (("sparse", "", 22), ("dense", "0" * 20, 8)):
        with pytest.raises(PayloadError, match=f"up to {most}"):
            read(form, tensor(words_of(before + omega(value))), 21, 7)


@pytest.mark.usefixtures("tiny_chunks")
def test_the_longest_records_stay_inside():
    """A record of 87 bits leads beyond a chunk of 32 and what is looked at ahead of it."""
    bits = omega(6) + "000" * 2 + (omega(2**31) + "0") * 20
    with pytest.raises(PayloadError, match="up to 9"):
        read("sparse", tensor(words_of(bits)), 9, 3)


@pytest.mark.parametrize("form", ["dense", "sparse"])
@pytest.mark.parametrize(
    "words",
    [torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int32)],
)
def test_only_one_dimensional_int32_is_read(form, words):
    with pytest.raises(PayloadError, match="int32"):
        read(form, words, 3, 3)


word = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0, 2**32 - 1, 1, 2**31]))


@quick
@given(
    st.sampled_from(["dense", "sparse"]),
    st.lists(word, max_size=6),
    st.integers(0, 60),
    st.sampled_from([1, 3, 32767]),
)
def test_any_words_are_refused_or_are_a_writers(form, words, n, levels):
    """A stream that reads as codes is the very one that these codes are written as."""
    stream = tensor(words)
    try:
        codes = read(form, stream, n, levels)
    except PayloadError:
        return
    assert codes.shape == (n,)
    assert codes.dtype == torch.int32
    assert int(codes.abs().max()) <= levels if n else True
    assert torch.equal(write(form, codes, levels), stream)


@quick
@given(st.data())
def test_damaged_streams(data):
    """Flipped bits, cut and added words: refused, or the stream of other codes."""
    form = data.draw(st.sampled_from(["dense", "sparse"]))
    codes = torch.tensor(data.draw(st.lists(st.integers(-9, 9), min_size=1, max_size=40)))
    words = unsigned(write(form, codes, 9))
    for _ in range(data.draw(st.integers(0, 3))):
        bit = data.draw(st.integers(0, 32 * len(words) - 1))
        words[bit // 32] ^= 1 << bit % 32
    words = words[: data.draw(st.integers(0, len(words)))] + data.draw(st.lists(word, max_size=2))
    try:
        result = read(form, tensor(words), len(codes), 9)
    except PayloadError:
        return
    assert unsigned(write(form, result, 9)) == words
