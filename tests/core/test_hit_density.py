# SPDX-License-Identifier: Apache-2.0
"""Hit density against a plain model, on memory that lies, and from several threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from density_model import BINS, CLASSES, SCORE_MAX, WAYS, Density, Life
from hypothesis import given, settings
from hypothesis import strategies as st

NO_END = 0xFFFFFFFF


class Unit:
    """The C code over memory of its own."""

    def __init__(self, core: Any, block_count: int, noise: bytes = b"") -> None:
        self.lib, self.ffi = core.lib, core.ffi
        self.bytes = int(self.lib.ckv_density_bytes(block_count))
        raw = self.ffi.new("char[]", self.bytes + 128)
        at = -int(self.ffi.cast("uintptr_t", raw)) % 64
        self.memory = raw + at
        self._kept = raw
        self.fence = self.ffi.buffer(raw + at + self.bytes, 64 - at)
        self.d = self.ffi.new("struct ckv_density *")
        self.lib.ckv_density_attach(self.d, self.memory, block_count)
        self.lib.ckv_density_init(self.d)
        self.life = self.ffi.new("uint64_t *")

    def hit(self, hash_: int, word: int, end: int | None) -> int:
        self.life[0] = word
        from_end = NO_END if end is None else end
        self.lib.ckv_density_hit(self.d, hash_, self.life, from_end)
        return int(self.life[0])

    def miss(self, hash_: int, depth: int, from_end: int) -> int:
        return int(self.lib.ckv_density_miss(self.d, hash_, depth, from_end))

    def score(self, word: int) -> int:
        return int(self.lib.ckv_density_score(self.d, word))

    def scores(self) -> list[list[int]]:
        size = CLASSES * (BINS + 1)
        flat = self.ffi.unpack(self.ffi.cast("int32_t *", self.d.scores), size)
        return [flat[c * (BINS + 1) : (c + 1) * (BINS + 1)] for c in range(CLASSES)]


def name(key: int) -> int:
    return key * 0x9E3779B97F4A7C15 % 2**64


def replay(core: Any, seed: int, blocks: int, keys: int, steps: int) -> None:
    """Does the same to both and looks at everything that they say."""
    unit, model = Unit(core, blocks), Density(blocks)
    model.capacity = blocks
    unit.lib.ckv_density_resize(unit.d, blocks)
    choice = random.Random(seed)
    held: dict[int, Life] = {}
    for _ in range(steps):
        key = min(int(choice.expovariate(8 / keys)), keys - 1)
        if key in held:
            end = choice.choice([None, 0, 3, 20])
            word = unit.hit(name(key), held[key].word(), end)
            held[key] = model.hit(name(key), held[key], end)
        else:
            place = (choice.randrange(99), choice.randrange(33))
            word = unit.miss(name(key), *place)
            life = model.miss(name(key), *place)
            assert word == life.word()
            admitted = model.admits(life)
            assert bool(unit.lib.ckv_density_admits(unit.d, word)) == admitted
            if not admitted:
                unit.lib.ckv_density_refused(unit.d, 1)
                unit.lib.ckv_density_remember(unit.d, name(key), word)
                model.refused(1)
                model.remember(name(key), life)
                continue
            held[key] = life
        assert word == held[key].word()
        if len(held) > blocks:
            victim = choice.choice(list(held))
            passed = choice.randrange(20)
            life = held.pop(victim)
            assert unit.score(life.word()) == model.score(life)
            unit.lib.ckv_density_took(unit.d, passed)
            unit.lib.ckv_density_remember(unit.d, name(victim), life.word())
            model.took(passed)
            model.remember(name(victim), life)
        known = model.recall(name(key))
        recalled = int(unit.lib.ckv_density_recall(unit.d, name(key)))
        assert recalled == (known.word() if known else 0)
        assert unit.lib.ckv_density_threshold(unit.d) == model.threshold
        due = model.is_due()
        assert bool(unit.lib.ckv_density_due(unit.d)) == due
        if due:
            unit.lib.ckv_density_rebuild(unit.d)
            model.rebuild()
            assert unit.scores() == model.scores
    assert unit.d.head.now == model.now


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([60, 300, 999]), st.sampled_from([2, 20]))
def test_agrees_with_the_model(core, seed, blocks, spread):
    replay(core, seed, blocks, blocks * spread, 900)


def test_agrees_where_keys_are_sampled(core):
    """More blocks than the tracker can follow: some keys are, and many drop out."""
    replay(core, 3, 5000, 200_000, 12_000)


def test_a_hot_class_scores_above_a_cold_one(core):
    unit = Unit(core, 1000)
    unit.lib.ckv_density_resize(unit.d, 1000)
    hot = {key: unit.miss(name(key), 0, 0) for key in range(50)}
    for turn in range(200):
        for key in hot:
            hot[key] = unit.hit(name(key), hot[key], None)
        for i in range(50):
            cold = unit.miss(name(10_000 + turn * 50 + i), 0, 0)
    unit.lib.ckv_density_rebuild(unit.d)
    assert unit.score(hot[0]) > unit.score(cold) + (3 << 16)  # 8 times the hits


def test_sights_close_together_are_one_access(core):
    unit = Unit(core, 6400)
    unit.lib.ckv_density_resize(unit.d, 6400)  # a window of 100 accesses
    word = unit.miss(1, 0, 0)
    assert unit.hit(1, word, 5) == word
    unit.d.head.now += 99
    assert unit.hit(1, word, 5) == word
    unit.d.head.now += 1
    assert unit.hit(1, word, 5) != word
    assert unit.d.head.now == 102
    unit.lib.ckv_density_remember(unit.d, 2, unit.miss(2, 7, 0))
    assert unit.miss(2, 7, 0) >> 32 == 103  # refused, and offered again at once


def test_the_first_capacity_of_blocks_is_admitted_whatever_its_score(core):
    unit = Unit(core, 100)
    unit.lib.ckv_density_resize(unit.d, 100)
    unit.d.head.threshold = SCORE_MAX
    word = unit.miss(1, 0, 0)
    for _ in range(100):
        assert unit.lib.ckv_density_admits(unit.d, word)
        unit.lib.ckv_density_took(unit.d, 8)
    assert not unit.lib.ckv_density_admits(unit.d, word)


def test_a_rebuild_belongs_to_one(core):
    unit = Unit(core, 400)
    unit.lib.ckv_density_resize(unit.d, 400)
    assert not unit.lib.ckv_density_due(unit.d)
    unit.d.head.now = 200
    assert unit.lib.ckv_density_due(unit.d)
    assert not unit.lib.ckv_density_due(unit.d)  # though it was never done
    unit.d.head.now = 301
    assert unit.lib.ckv_density_due(unit.d)
    unit.d.head.due = 2**60  # nonsense: not until the end of time
    assert unit.lib.ckv_density_due(unit.d)


@pytest.mark.parametrize("seed", range(8))
def test_any_memory_is_harmless(core, seed):
    """Every word is noise: results may be nonsense, nothing outside is touched."""
    choice = random.Random(seed)
    unit = Unit(core, 200)
    if seed % 2:
        unit.ffi.buffer(unit.memory, unit.bytes)[:] = choice.randbytes(unit.bytes)
    else:
        fill = choice.choice([b"\xff", b"\x01", b"\x80", b"\x7f"])
        unit.ffi.buffer(unit.memory, unit.bytes)[:] = fill * unit.bytes
    unit.fence[:] = b"\xaa" * len(unit.fence)
    for _ in range(2000):
        word = choice.getrandbits(64)
        hash_ = choice.getrandbits(64)
        word = unit.hit(hash_, word, choice.choice([None, 2**31]))
        assert -SCORE_MAX <= unit.score(word) <= SCORE_MAX
        assert -SCORE_MAX <= unit.score(choice.getrandbits(64)) <= SCORE_MAX
        unit.miss(hash_, choice.getrandbits(32), choice.getrandbits(32))
        unit.lib.ckv_density_remember(unit.d, hash_, choice.getrandbits(64))
        unit.lib.ckv_density_recall(unit.d, hash_)
        unit.lib.ckv_density_took(unit.d, choice.getrandbits(32))
        unit.lib.ckv_density_refused(unit.d, choice.getrandbits(32))
        assert abs(unit.lib.ckv_density_threshold(unit.d)) <= SCORE_MAX
    unit.lib.ckv_density_rebuild(unit.d)
    assert all(abs(v) <= SCORE_MAX for row in unit.scores() for v in row)
    assert bytes(unit.fence) == b"\xaa" * len(unit.fence)


def test_threads_lose_observations_and_nothing_else(core):
    unit = Unit(core, 2000)
    unit.lib.ckv_density_resize(unit.d, 63)  # every sight counts, every 16th is due
    words = unit.ffi.new("uint64_t[]", 64)
    rounds, threads = 3000, 4

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(rounds):
            key = choice.randrange(64)
            unit.lib.ckv_density_hit(unit.d, name(key), words + key, 0)
            unit.lib.ckv_density_remember(unit.d, name(choice.randrange(9999)), 1)
            if unit.lib.ckv_density_due(unit.d):
                unit.lib.ckv_density_rebuild(unit.d)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert unit.d.head.now == rounds * threads
    assert unit.d.head.rebuilds >= rounds * threads // 32
    tags = [
        [unit.d.ghost[b * WAYS + w] >> 6 & 0x3FFFFFF for w in range(WAYS)]
        for b in range(unit.d.ghost_buckets)
    ]
    assert sum(any(tags[b]) for b in range(len(tags))) == len(tags)
