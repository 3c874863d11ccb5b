# SPDX-License-Identifier: Apache-2.0
"""SHA-256 against hashlib: one shot, streaming, and each kernel alone."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

NOISE = b"".join(hashlib.sha256(b"sha%d" % i).digest() for i in range(1024))
START = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A]
START += [0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]


def digest_of(core, data: bytes) -> bytes:
    digest = core.ffi.new("uint8_t[32]")
    core.lib.ckv_sha256(data, len(data), digest)
    return bytes(digest)


def kernels_of(core):
    infos = core.ffi.new("struct ckv_sha256_kernel_info[4]")
    count = core.lib.ckv_sha256_kernels(infos, 4)
    return {core.ffi.string(i.name).decode(): i.compress for i in infos[0:count]}


def padded(data: bytes) -> bytes:
    zeros = bytes((55 - len(data)) % 64)
    return data + b"\x80" + zeros + (8 * len(data)).to_bytes(8, "big")


def digest_by(core, compress, data: bytes) -> bytes:
    words = core.ffi.new("uint32_t[8]", START)
    blocks = padded(data)
    compress(words, blocks, len(blocks) // 64)
    return b"".join(word.to_bytes(4, "big") for word in words)


def test_published_vectors(core):
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    prefix_0 = "d0f3364baf2685e5b5fc6d8e20fbca3f36cb1a28e3877fc2030e564e4e14dd40"
    assert digest_of(core, b"abc").hex() == abc
    assert digest_of(core, b"prefix-0").hex() == prefix_0


def test_every_length_up_to_300(core):
    kernels = kernels_of(core)
    for length in range(301):
        data = NOISE[:length]
        expected = hashlib.sha256(data).digest()
        assert digest_of(core, data) == expected, length
        for name, compress in kernels.items():
            assert digest_by(core, compress, data) == expected, (name, length)


@given(data=st.binary(max_size=5000))
def test_kernels_agree(core, data):
    expected = hashlib.sha256(data).digest()
    assert digest_of(core, data) == expected
    for name, compress in kernels_of(core).items():
        assert digest_by(core, compress, data) == expected, name


@settings(max_examples=200)
@given(cuts=st.lists(st.integers(0, 200) | st.integers(0, 5000), max_size=12))
def test_random_chunks(core, cuts):
    state = core.ffi.new("struct ckv_sha256_state *")
    core.lib.ckv_sha256_init(state)
    reference = hashlib.sha256()
    position = 0
    for length in cuts:
        chunk = NOISE[position : position + length]
        position += len(chunk)
        core.lib.ckv_sha256_update(state, chunk, len(chunk))
        reference.update(chunk)
    digest = core.ffi.new("uint8_t[32]")
    core.lib.ckv_sha256_final(state, digest)
    assert bytes(digest) == reference.digest()


def test_a_copied_state_goes_its_own_way(core):
    first = core.ffi.new("struct ckv_sha256_state *")
    core.lib.ckv_sha256_init(first)
    core.lib.ckv_sha256_update(first, b"common " * 10, 70)
    second = core.ffi.new("struct ckv_sha256_state *", first[0])
    for state, ending in ((first, b"one"), (second, b"two")):
        core.lib.ckv_sha256_update(state, ending, 3)
        digest = core.ffi.new("uint8_t[32]")
        core.lib.ckv_sha256_final(state, digest)
        assert bytes(digest) == hashlib.sha256(b"common " * 10 + ending).digest()


def test_nothing(core):
    digest = core.ffi.new("uint8_t[32]")
    core.lib.ckv_sha256(core.ffi.NULL, 0, digest)
    assert bytes(digest) == hashlib.sha256().digest()


def test_listing(core):
    count = core.lib.ckv_sha256_kernels(core.ffi.NULL, 0)
    infos = core.ffi.new("struct ckv_sha256_kernel_info[4]")
    assert core.lib.ckv_sha256_kernels(infos, 1) == count
    assert core.ffi.string(infos[0].name) == b"portable"
    assert infos[1].name == core.ffi.NULL
