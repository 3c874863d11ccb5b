# SPDX-License-Identifier: Apache-2.0
"""hit_density.c in plain Python: records and lists in place of packed words.

The arithmetic of a rebuild is that of IEEE doubles in the order of the C code, so the
scores of the two agree to the last bit.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

BINS, CLASSES, WAYS, GHOST_WAYS = 56, 88, 8, 32
AIM, SHRINKAGE, OBSERVATION = 8, 20, 64
SCORE_MAX = 64 << 16
MASK = 2**64 - 1

# In half accesses: [1, 1.5), [1.5, 2), [2, 3), ...
BEGINS = [(2 if b % 2 == 0 else 3) << b // 2 for b in range(BINS + 1)]


def bin_of(age: int) -> int:
    return max(0, min(BINS, bisect.bisect_right(BEGINS, 2 * age)) - 1)


def level(value: int, *borders: int) -> int:
    return sum(value >= border for border in borders)


def mix(value: int) -> int:
    for _ in range(2):
        value = (value ^ value >> 32) * 0xD6E8FEB86659FD93 & MASK
    return value ^ value >> 32


def log2(value: float) -> int:
    """In 2^-16 octaves, rounded down."""
    octave = 0
    while value >= 2 and octave < 64:
        value, octave = value / 2, octave + 1
    while value < 1 and octave > -64:
        value, octave = value * 2, octave - 1
    fraction = 0
    for _ in range(16):
        value, fraction = value * value, fraction * 2
        if value >= 2:
            value, fraction = value / 2, fraction + 1
    return max(-SCORE_MAX, min(SCORE_MAX, octave * 65536 + fraction))


@dataclass(frozen=True)
class Life:
    last: int
    count: int
    end: int = 0
    depth: int = 0
    kind: int = 0

    def word(self) -> int:
        """As hit_density.h packs it."""
        return (
            self.last << 32
            | self.kind << 24
            | self.end << 22
            | self.depth << 6
            | self.count << 1
            | 1
        )


def classify(count: int, end: int, depth: int, gap: int) -> int:
    if count <= 1:
        return level(depth, 4, 16, 48) * 4 + end
    if count <= 3:
        return 16 + (count - 2) * 4 + end
    return 24 + level(count, 6, 10, 21) * 16 + gap * 4 + end


def group_of(kind: int) -> int:
    return (
        0 if kind < 16 else 1 + (kind - 16) // 4 if kind < 24 else 3 + (kind - 24) // 16
    )


class Density:
    def __init__(self, block_count: int) -> None:
        self.ghosts = max(1, block_count // (GHOST_WAYS // 2))
        self.trackers = max(16384, block_count // 2) // WAYS
        self.ghost: dict[int, list[tuple[int, Life]]] = {}  # newest first
        self.tracker: dict[int, list[tuple[int, int, int] | None]] = {}
        self.ended = [[0] * BINS for _ in range(CLASSES)]
        self.dropped = [[0] * BINS for _ in range(CLASSES)]
        self.scores = [[-log2(b / 2) for b in BEGINS] for _ in range(CLASSES)]
        self.now = self.due = self.threshold = self.taken = 0
        self.capacity = 1

    # ---- accesses ----------------------------------------------------------------

    def _just_seen(self, life: Life) -> bool:
        return self.now - life.last < self.capacity // 64

    def _go_on(self, hash_: int, life: Life | None, end: int, depth: int) -> Life:
        gap, count = 3, 2
        self.now += 1
        if life is not None:
            age = self.now - life.last
            gap = sum(age > self.capacity // part for part in (64, 4, 1))
            count = min(31, life.count + 1)
        kind = classify(count, end, depth, gap)
        self._track(hash_, kind)
        return Life(self.now, count, end, depth, kind)

    def hit(self, hash_: int, life: Life | None, from_end: int | None) -> Life:
        if life is not None and self._just_seen(life):
            return life
        if from_end is not None:
            end = level(from_end, 1, 4, 16)
        else:
            end = life.end if life is not None else 0
        return self._go_on(hash_, life, end, life.depth if life is not None else 0)

    def miss(self, hash_: int, depth: int, from_end: int) -> Life:
        end, depth = level(from_end, 1, 4, 16), min(65535, depth)
        bucket, tag = self._ghost_place(hash_)
        queue = self.ghost.get(bucket, [])
        for i, (other, life) in enumerate(queue):
            if other == tag:
                queue[i] = (-1, life)  # a gap, to be filled first
                if self._just_seen(life):
                    kind = classify(life.count, end, depth, 0)
                    return Life(life.last, life.count, end, depth, kind)
                return self._go_on(hash_, life, end, depth)
        self.now += 1
        kind = classify(1, end, depth, 0)
        self._track(hash_, kind)
        return Life(self.now, 1, end, depth, kind)

    # ---- ghost -------------------------------------------------------------------

    def _ghost_place(self, hash_: int) -> tuple[int, int]:
        mixed = mix(hash_)
        return (mixed >> 32) * self.ghosts >> 32, mix(mixed) >> 38

    def remember(self, hash_: int, life: Life) -> None:
        bucket, tag = self._ghost_place(hash_)
        queue = self.ghost.setdefault(bucket, [])
        for i, (other, _) in enumerate(queue):
            if other in (-1, tag):
                del queue[i]
                break
        queue.insert(0, (tag, Life(life.last, life.count)))
        del queue[GHOST_WAYS:]

    def recall(self, hash_: int) -> Life | None:
        bucket, tag = self._ghost_place(hash_)
        return dict(reversed(self.ghost.get(bucket, []))).get(tag)

    # ---- tracker -----------------------------------------------------------------

    def _track(self, hash_: int, kind: int) -> None:
        mixed, span = mix(hash_), min(self.capacity * 8, 2**32 - 1)
        if (mixed & 2**32 - 1) * span >> 32 >= self.trackers * WAYS:
            return
        ways = self.tracker.setdefault(
            (mixed >> 32) * self.trackers >> 32, [None] * WAYS
        )
        tag = mix(mixed) >> 41
        known = [i for i, way in enumerate(ways) if way is not None and way[0] == tag]
        empty = [i for i, way in enumerate(ways) if way is None]
        oldest = min(range(WAYS), key=lambda i: way[1] if (way := ways[i]) else -1)
        at = (known + empty + [oldest])[0]
        old = ways[at]
        if old is not None:
            table = self.ended if known else self.dropped
            table[old[2]][bin_of(self.now - old[1])] += OBSERVATION
        ways[at] = (tag, self.now, kind)

    # ---- scores ------------------------------------------------------------------

    def score(self, life: Life) -> int:
        age = self.now - life.last
        b = bin_of(age)
        here, after = self.scores[life.kind][b], self.scores[life.kind][b + 1]
        into, width = 2 * age - BEGINS[b], BEGINS[b + 1] - BEGINS[b]
        if into <= 0:
            return here
        step = (after - here) * into  # C rounds towards zero
        return here + (abs(step) // width) * (1 if step > 0 else -1)

    def admits(self, life: Life) -> bool:
        return self.taken < self.capacity or self.score(life) >= self.threshold

    def took(self, passed: int) -> None:
        self.taken += 1
        self._move(min(18909, (passed - AIM) * 945))

    def refused(self, count: int) -> None:
        self._move(-min(18909, count * 189))

    def _move(self, step: int) -> None:
        self.threshold = max(-SCORE_MAX, min(SCORE_MAX, self.threshold + step))

    def is_due(self) -> bool:
        if self.now < self.due:
            return False
        begun, self.due = self.due != 0, self.now + self.capacity // 4 + 1
        return begun

    def rebuild(self) -> None:
        open_ = [[0] * BINS for _ in range(CLASSES)]
        for way in [w for ways in self.tracker.values() for w in ways if w]:
            open_[way[2]][bin_of(self.now - way[1])] += 1
        one = [self._lives(c, open_[c]) for c in range(CLASSES)]
        total = self._sum(one)
        general = [e / r if r else 0.0 for e, r in zip(*total, strict=True)]
        groups = [
            self._estimate(
                self._sum([one[c] for c in range(CLASSES) if group_of(c) == g]), general
            )
            for g in range(7)
        ]
        for kind in range(CLASSES):
            hazard = self._estimate(one[kind], groups[group_of(kind)])
            self.scores[kind] = self._row(hazard)
        for table in (self.ended, self.dropped):
            for row in table:
                row[:] = [v - v // 20 - (v % 20 != 0) for v in row]

    def _lives(self, kind: int, open_: list[int]) -> tuple[list[float], list[float]]:
        ended = [v / OBSERVATION for v in self.ended[kind]]
        at_risk, older = [0.0] * BINS, 0.0
        for b in reversed(range(BINS)):
            older += ended[b] + self.dropped[kind][b] / OBSERVATION + open_[b]
            at_risk[b] = older
        return ended, at_risk

    @staticmethod
    def _sum(
        lives: list[tuple[list[float], list[float]]],
    ) -> tuple[list[float], list[float]]:
        ended, at_risk = [0.0] * BINS, [0.0] * BINS
        for one, risk in lives:
            ended = [a + b for a, b in zip(ended, one, strict=True)]
            at_risk = [a + b for a, b in zip(at_risk, risk, strict=True)]
        return ended, at_risk

    @staticmethod
    def _estimate(
        lives: tuple[list[float], list[float]], general: list[float]
    ) -> list[float]:
        return [
            (ended + SHRINKAGE * g) / (risk + SHRINKAGE)
            for ended, risk, g in zip(*lives, general, strict=True)
        ]

    @staticmethod
    def _row(hazard: list[float]) -> list[int]:
        hits, time, alive = [0.0], [0.0], 1.0
        for b, h in enumerate(hazard):
            hits.append(hits[-1] + alive * h)
            width = (BEGINS[b + 1] - BEGINS[b]) / 2
            time.append(time[-1] + alive * width * (1 - h / 2))
            alive *= 1 - h
        row = []
        for b in range(BINS):  # the definition; the C code walks a hull
            slopes = [
                (hits[e] - hits[b]) / (time[e] - time[b])
                for e in range(b + 1, BINS + 1)
                if time[e] > time[b]
            ]
            row.append(log2(max(slopes, default=0.0)))
        return [*row, row[-1]]
