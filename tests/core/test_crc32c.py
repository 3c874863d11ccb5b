# SPDX-License-Identifier: Apache-2.0
"""All CRC-32C kernels against each other, the crc32c package and known values."""

from __future__ import annotations

import hashlib
import threading

import crc32c
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

KIB = 1024
MIB = 1024 * KIB

# One buffer for all cases: hypothesis chooses a piece of it, not its bytes.
NOISE = b"".join(hashlib.sha256(b"crc%d" % i).digest() for i in range(2048))

# Where kernels change their plan: words, folds, lanes, blocks of the mixed loop.
EDGES = [0, 1, 7, 8, 15, 16, 47, 48, 63, 64, 127, 128, 191, 192, 255, 256, 383, 384]
EDGES += [511, 512, 4031, 4032, 4095, 4096, 6719, 6720, 13439, 13440, 20543]
LENGTHS = st.one_of(
    st.integers(0, 600),
    st.integers(0, 30_000),
    st.tuples(st.sampled_from(EDGES), st.integers(0, 17)).map(sum),
)


def kernels_of(core):
    """Name and function of every kernel of this processor, and of the public entry."""
    infos = core.ffi.new("struct ckv_crc32c_kernel_info[8]")
    count = core.lib.ckv_crc32c_kernels(infos, 8)
    found = {core.ffi.string(i.name).decode(): i.update for i in infos[0:count]}
    assert len(found) == count
    return {**found, "public": core.lib.ckv_crc32c}


def xorshift_words(state: int, length: int) -> bytes:
    """Value `state` of the reference benchmark: xorshift64*, little-endian words."""
    mask = (1 << 64) - 1
    state = state or 0x9E3779B97F4A7C15
    words = []
    for _ in range(length // 8):
        state ^= state >> 12
        state = (state ^ (state << 25)) & mask
        state ^= state >> 27
        words.append(((state * 0x2545F4914F6CD1DB) & mask).to_bytes(8, "little"))
    return b"".join(words)


def test_check_value(core):
    for name, update in kernels_of(core).items():
        assert update(0, b"123456789", 9) == 0xE3069283, name


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_rfc_vectors(core, data, crc):
    for name, update in kernels_of(core).items():
        assert update(0, data, len(data)) == crc, name


def test_nothing_changes_nothing(core):
    for name, update in kernels_of(core).items():
        assert update(0, core.ffi.NULL, 0) == 0, name
        assert update(0x12345678, core.ffi.NULL, 0) == 0x12345678, name


def test_every_short_length(core):
    source = core.ffi.from_buffer(NOISE)
    for name, update in kernels_of(core).items():
        for length in range(1200):
            expected = crc32c.crc32c(NOISE[3 : 3 + length])
            assert update(0, source + 3, length) == expected, (name, length)


@settings(max_examples=300)
@given(length=LENGTHS, offset=st.integers(0, 130), crc=st.integers(0, 2**32 - 1))
@example(length=30_000, offset=1, crc=0)
def test_kernels_agree(core, length, offset, crc):
    source = core.ffi.from_buffer(NOISE) + offset
    expected = crc32c.crc32c(NOISE[offset : offset + length], crc)
    for name, update in kernels_of(core).items():
        assert update(crc, source, length) == expected, name


@settings(max_examples=100)
@given(pieces=st.lists(LENGTHS, max_size=6))
def test_splits_and_combination(core, pieces):
    whole = NOISE[: min(sum(pieces), len(NOISE))]
    expected = crc32c.crc32c(whole)
    for name, update in kernels_of(core).items():
        running = combined = position = 0
        for length in pieces:
            piece = whole[position : position + length]
            position += len(piece)
            running = update(running, piece, len(piece))
            own = update(0, piece, len(piece))
            combined = core.lib.ckv_crc32c_combine(combined, own, len(piece))
        assert running == combined == expected, name


@given(
    crc=st.integers(0, 2**32 - 1),
    first=st.integers(0, 2**62),
    second=st.integers(0, 2**62),
)
@example(crc=1, first=2**28, second=2**28)  # across the period of C3
def test_combination_of_lengths_adds_up(core, crc, first, second):
    combine = core.lib.ckv_crc32c_combine
    in_steps = combine(combine(crc, 0, first), 0, second)
    assert in_steps == combine(crc, 0, first + second)


def test_combination_over_a_long_piece(core):
    length = 64 * MIB
    zeros = crc32c.crc32c(bytes(length))
    expected = crc32c.crc32c(bytes(length), crc32c.crc32c(b"head"))
    combined = core.lib.ckv_crc32c_combine(crc32c.crc32c(b"head"), zeros, length)
    assert combined == expected


@pytest.mark.parametrize(
    ("length", "index", "value_crc", "both_crc", "tail"),
    [
        (64 * KIB, 0, 0x48BE9F53, 0x34846070, "3361f5df76bcda5f"),
        (512 * KIB, 0, 0x29238764, 0x5DCF0252, "ff6125a20da6e922"),
        (512 * KIB, 1, 0xE98744AA, 0x9C00A619, "d486436a3da11daf"),
        (512 * KIB, 2, 0x65BC790A, 0x13806E4F, "0f74c2608b492292"),
        (2 * MIB, 0, 0x9D4EB04D, 0x82675ACD, "1505beecf287549f"),
        (2 * MIB, 1, 0x8099B664, 0xF443FFD0, "6f1685777950b834"),
        (2 * MIB, 2, 0x946A227A, 0x3C8C71C8, "e498411838477a1f"),
        (2 * MIB, 2**40, 0xE7BC8135, 0xA0361162, "0aba51e9a98ca946"),
    ],
)
def test_reference_values(core, length, index, value_crc, both_crc, tail):
    value = xorshift_words(index, length)
    metadata = hashlib.sha256(b"prefix-%d" % index).digest() * 2
    assert value[-8:].hex() == tail
    for name, update in kernels_of(core).items():
        assert update(0, value, length) == value_crc, name
        crc = update(0, metadata, len(metadata))
        assert update(crc, value, length) == both_crc, name


def test_reads_nothing_beyond_the_piece(core):
    """Each kernel on a piece that is an allocation of its own, for ASan to guard."""
    for name, update in kernels_of(core).items():
        for length in [*range(1, 300), *EDGES[1:]]:
            piece = core.ffi.new("uint8_t[]", NOISE[:length])
            assert update(0, piece, length) == crc32c.crc32c(NOISE[:length]), name


def test_listing(core):
    lib, ffi = core.lib, core.ffi
    count = lib.ckv_crc32c_kernels(ffi.NULL, 0)
    infos = ffi.new("struct ckv_crc32c_kernel_info[8]")
    assert lib.ckv_crc32c_kernels(infos, 1) == count
    assert ffi.string(infos[0].name) == b"portable"
    assert infos[1].name == ffi.NULL
    assert ffi.string(lib.ckv_crc32c_kernel()).decode() in kernels_of(core)


def test_many_threads_choose_the_same_kernel(core):
    results = set()

    def work():
        for _ in range(200):
            results.add(core.lib.ckv_crc32c(0, NOISE, 4096))
            results.add(core.lib.ckv_crc32c_kernel())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {crc32c.crc32c(NOISE[:4096]), core.lib.ckv_crc32c_kernel()}
