# SPDX-License-Identifier: Apache-2.0
"""The generators: reference vectors, and the fast way against the plain one."""

from __future__ import annotations

import itertools

import pytest

np = pytest.importorskip("numpy")

from bench import generators, vectors  # noqa: E402


def plain_value(index, nbytes):
    random = generators.XorShift(index)
    return b"".join(random.next().to_bytes(8, "little") for _ in range(nbytes // 8))


@pytest.mark.parametrize("vector", vectors.check(), ids=lambda vector: vector.name)
def test_reference_vector(vector):
    assert vector.found == vector.expected


@pytest.mark.parametrize("nbytes", [8, 24, 4096, 4104, 65536])
def test_lanes_give_the_same_bytes_as_a_plain_loop(nbytes):
    assert generators.value(7, nbytes) == plain_value(7, nbytes)


def test_blocks_generated_together_are_those_generated_alone():
    indices = [0, 5, 2**40]
    together = generators.values(indices, 4096)
    assert [row.tobytes() for row in together] == [
        generators.value(index, 4096) for index in indices
    ]


def test_a_shorter_value_is_a_prefix_of_a_longer_one():
    assert generators.value(3, 65536)[:4096] == generators.value(3, 4096)


@pytest.mark.parametrize("nbytes", [0, 12])
def test_values_refuses_sizes_that_are_not_whole_words(nbytes):
    with pytest.raises(ValueError, match="multiple of 8"):
        generators.values([0], nbytes)


def test_permutation_has_every_index_once():
    assert sorted(generators.permutation(100)) == list(range(100))


def test_scans_ask_for_each_key_once():
    stream = itertools.islice(generators.churn_stream(64, 0, scan=True), 2000)
    scanned = [index for index in stream if index >= generators.SCAN_BASE]
    assert 100 < len(scanned) == len(set(scanned))
