# SPDX-License-Identifier: Apache-2.0
"""admission.c and the tier around it, in plain Python, for one thread.

``Admission`` has the same words in the same places as the memory of the C code, so
that both can be compared.  ``Tier`` is a volume of blocks of one size in one stripe: a
clock in place that asks ``Admission`` when it is full.
"""

from __future__ import annotations

MASK = 2**64 - 1
WAYS = 16
RING_MIN, RING_MAX = 1024, 1 << 20
TOUCHED = 2048
GHOST_EPOCHS = 256
READ, TOUCH, PUT, PUT_KNOWN = range(4)


def align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def ghost_words(keys: int) -> int:
    return align(keys + keys // 2 + 1, WAYS)


def ring_max_of(entries: int) -> int:
    return align(max(RING_MIN, min(entries // 8, RING_MAX - 32)), 32)


class Ghost:
    def __init__(self, keys: int) -> None:
        self.words = [0] * ghost_words(keys)
        self.epoch = self.count = 0

    @property
    def clock(self) -> int:
        return self.epoch << 32 | self.count

    def _bucket(self, mixed: int) -> range:
        bucket = (mixed >> 32) * (len(self.words) // WAYS) >> 32
        return range(bucket * WAYS, bucket * WAYS + WAYS)

    @staticmethod
    def _tag(mixed: int) -> int:
        return (mixed >> 12 & 0xFFFFF) or 1

    def _age(self, word: int) -> int:
        return (self.epoch - word) % 4096 if word else 4096

    def knows(self, mixed: int, capacity: int) -> bool:
        for at in self._bucket(mixed):
            if self.words[at] >> 12 == self._tag(mixed):
                window = capacity // (capacity // GHOST_EPOCHS + 1)
                return self._age(self.words[at]) <= window
        return False

    def remember(self, mixed: int, capacity: int) -> None:
        bucket = self._bucket(mixed)
        known = [at for at in bucket if self.words[at] >> 12 == self._tag(mixed)]
        ages = [self._age(self.words[at]) for at in bucket]
        place = known[0] if known else bucket[ages.index(max(ages))]
        self.words[place] = self._tag(mixed) << 12 | self.epoch % 4096
        self.count += 1
        if self.count >= capacity // GHOST_EPOCHS + 1:
            self.epoch, self.count = self.epoch + 1, 0


class Shadow:
    def __init__(self, ring_max: int) -> None:
        self.ring = [0] * ring_max
        self.index = [0] * (2 * ring_max)
        self.hand = self.misses = 0

    def _bucket(self, fingerprint: int) -> range:
        bucket = fingerprint * (len(self.index) // WAYS) >> 30
        return range(bucket * WAYS, bucket * WAYS + WAYS)

    @staticmethod
    def _word(fingerprint: int, position: int) -> int:
        return (fingerprint & 0xFFF) << 20 | position

    def find(self, fingerprint: int, places: int) -> int:
        for at in self._bucket(fingerprint):
            position = self.index[at] & 0xFFFFF
            if (
                0 < position < places
                and self.index[at] == self._word(fingerprint, position)
                and self.ring[position] >> 2 == fingerprint
            ):
                return position
        return 0

    def hit(self, fingerprint: int, places: int) -> bool:
        position = self.find(fingerprint, places)
        if position and self.ring[position] & 3 < 2:
            self.ring[position] += 1
        return position != 0

    def next(self, places: int) -> int:
        return 1 + self.hand % (places - 1)

    def _counts(self, at: int, places: int) -> bool:
        position = self.index[at] & 0xFFFFF
        if not 0 < position < places:
            return False
        found = self.ring[position] >> 2
        return self.index[at] == self._word(found, position) and at in self._bucket(
            found
        )

    def insert(self, fingerprint: int, places: int) -> int:
        """Returns the fingerprint that gave way, or 0."""
        for _ in range(256):
            position = self.next(places)
            self.hand = (self.hand + 1) % 2**32
            word = self.ring[position]
            if word & 3 == 0:
                break
            self.ring[position] -= 1
        victim = word >> 2
        if victim:
            for at in self._bucket(victim):
                if self.index[at] == self._word(victim, position):
                    self.index[at] = 0
        self.ring[position] = fingerprint << 2
        bucket = self._bucket(fingerprint)
        free = [at for at in bucket if self.index[at] == 0]
        free += [at for at in bucket if not self._counts(at, places)]
        free.append(bucket[position % WAYS])
        self.index[free[0]] = self._word(fingerprint, position)
        return victim


class Admission:
    def __init__(self, entries: int) -> None:
        self.entries = entries
        self.ring_max = ring_max_of(entries)
        self.ghost = Ghost(entries)
        self.shadow_ghost = Ghost(self.ring_max)
        self.shadows = [Shadow(self.ring_max), Shadow(self.ring_max)]
        self.touched = [0] * TOUCHED
        self.capacity = self.sample_mask = 0
        self.samples = self.period = self.requests = self.switches = 0
        self.second_touch = 0

    def resize(self, blocks: int) -> None:
        distance = abs(blocks - self.capacity)
        blocks = min(blocks, self.entries)
        if blocks == 0 or distance <= self.capacity // 16:
            return
        shift = 0
        while blocks >> shift > self.ring_max or (
            shift < 3 and blocks >> shift + 1 >= 1024
        ):
            shift += 1
        self.sample_mask = (1 << shift) - 1
        self.capacity = blocks

    def samples_key(self, key: int) -> bool:
        return key & self.sample_mask == 0

    def _is_request(self, fingerprint: int, access: int) -> bool:
        at = fingerprint % TOUCHED
        tag, seen = fingerprint >> 6, self.touched[at]
        age = (self.period - seen) % 256
        noted = seen != 0 and seen >> 8 == tag and age <= 1
        if access == READ and noted:
            self.touched[at] = 0
        elif access == TOUCH and not noted:
            self.touched[at] = tag << 8 | self.period % 256
        return not noted or access >= PUT

    def access(self, key: int, access: int) -> None:
        fingerprint = ((key * 0xD1B54A32D192ED03 & MASK) >> 34) or 1
        if self.capacity == 0 or not self._is_request(fingerprint, access):
            return
        places = self.capacity // (self.sample_mask + 1) + 1
        places = max(2, min(places, self.ring_max))
        mixed = fingerprint * 0xA0761D6478BD642F & MASK
        for number, shadow in enumerate(self.shadows):
            if shadow.hit(fingerprint, places):
                continue
            shadow.misses += 1
            if (
                number == 1
                and access != PUT_KNOWN
                and shadow.ring[shadow.next(places)] != 0
                and not self.shadow_ghost.knows(mixed, places)
            ):
                self.shadow_ghost.remember(mixed, places)
                continue
            victim = shadow.insert(fingerprint, places)
            if number == 1 and victim:
                victim_mixed = victim * 0xA0761D6478BD642F & MASK
                self.shadow_ghost.remember(victim_mixed, places)
        self.samples += 1
        if self.samples >= places // 2:
            self._decide()

    def _decide(self) -> None:
        misses = [shadow.misses for shadow in self.shadows]
        current, other = misses[self.second_touch], misses[1 - self.second_touch]
        gain = current - other
        margin = 0 if self.second_touch else current // 20
        if gain >= 16 and gain > margin:
            self.second_touch = 1 - self.second_touch
            self.switches += 1
        self.requests += self.samples
        self.requests -= self.requests // 8
        for shadow in self.shadows:
            shadow.misses -= shadow.misses // 8
        self.samples = 0
        self.period += 1

    def knows(self, key: int) -> bool:
        return self.ghost.knows(key * 0x9E3779B97F4A7C15 & MASK, self.capacity)

    def remember(self, key: int) -> None:
        self.ghost.remember(key * 0x9E3779B97F4A7C15 & MASK, self.capacity)


class Tier:
    """Blocks of one size, `capacity` of them; `get_or_insert` is one request."""

    def __init__(self, capacity: int, admission: str) -> None:
        self.policy = admission
        self.admission = Admission(capacity)
        self.places: dict[int, int] = {}
        self.ring: list[int | None] = [None] * capacity
        self.heat = [0] * capacity
        self.hand = 0

    def get_or_insert(self, key: int) -> bool:
        admission = self.admission
        adaptive = self.policy == "adaptive"
        place = self.places.get(key)
        if place is not None:
            self.heat[place] = min(2, self.heat[place] + 1)
            if adaptive and admission.samples_key(key):
                admission.access(key, READ)
            return True
        if adaptive and admission.samples_key(key):
            admission.access(key, PUT)
        full = len(self.places) == len(self.ring)
        if not full:
            admission.resize(len(self.ring))
        asks = self.policy == "second-touch" or (adaptive and admission.second_touch)
        if full and asks and not admission.knows(key):
            admission.remember(key)
            return False
        self._store(key)
        return False

    def _store(self, key: int) -> None:
        for _ in range(256):
            if self.ring[self.hand] is None or self.heat[self.hand] == 0:
                break
            self.heat[self.hand] -= 1
            self.hand = (self.hand + 1) % len(self.ring)
        victim = self.ring[self.hand]
        if victim is not None:
            del self.places[victim]
            self.admission.remember(victim)
        self.ring[self.hand], self.heat[self.hand] = key, 0
        self.places[key] = self.hand
        self.hand = (self.hand + 1) % len(self.ring)
