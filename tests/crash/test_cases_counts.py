# SPDX-License-Identifier: Apache-2.0
"""Cases about sizes, lengths, counts and memory, each named after what went wrong."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash import cases_counts as counts


def test_b12_odd_sizes_and_addresses_come_back_empty(nursery, volume_folder: Path):
    nursery.call(counts.odd_sizes, folder=volume_folder)


def test_b13_a_write_that_hangs_holds_everybody_up(shimmed, volume_path):
    shimmed("none").call(counts.hung_write, path=volume_path)


def test_c1_n6_with_some_options_files_grow(
    nursery, volume_path, rng: random.Random, effort: float
):
    nursery.call(
        counts.files_that_grow,
        folder=volume_path.parent,
        seed=rng.getrandbits(32),
        rounds=max(1, round(8 * effort)),
    )


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of so many MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    options = f"size={request.param}m,mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, check=False).returncode != 0:
        pytest.skip("needs root for a mount of its own")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("small_disk", [40], indirect=True)
def test_d3_a_disk_that_is_too_small_stays_a_riddle(nursery, small_disk: Path):
    nursery.call(counts.too_small_at_first, folder=small_disk)


@pytest.mark.parametrize("small_disk", [64], indirect=True)
def test_c6_others_fill_the_disk_and_every_put_fails(nursery, small_disk: Path):
    nursery.call(counts.filled_by_others, folder=small_disk)


def test_h2_a_block_of_another_length_is_served(nursery, volume_path):
    nursery.call(counts.other_lengths, path=volume_path)


def test_i1_hits_are_counted_that_were_none(nursery, volume_path):
    nursery.call(counts.known_counts, path=volume_path)


def test_i2_a_cold_view_is_faulted_in_page_by_page(nursery, disk_folder: Path):
    faults = nursery.call(counts.faults_of_a_cold_view, path=disk_folder / "kv.cyc")
    assert faults < 64  # of 8192 pages


def test_i9_memory_grows_with_keys_that_are_gone(nursery, volume_path, effort: float):
    an_entry = nursery.call(
        counts.keys_that_are_gone, path=volume_path, laps=max(3, round(10 * effort))
    )
    # Of a volume of 32 MiB, with its fixed parts; memory alone is at most 160 bytes.
    assert an_entry < 600
