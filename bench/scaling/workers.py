# SPDX-License-Identifier: Apache-2.0
"""The same load from one to eight threads, and from one to eight processes.

Everybody begins at one moment of the monotonic clock, which all processes share, and
ends after the call that passes the end. A rate is the sum of what each did, over its
own seconds.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
import struct
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from bench import generators
from cyclone_kv import Cache, CacheConfig

__all__ = ["CONTAINS_BATCH", "LOADS", "Job", "Rate", "Team", "run_threads"]

CONTAINS_BATCH = 1000
"""Keys of one ``contains_many`` under load."""

LOADS = ("copy", "put", "view", "contains", "memcpy", "loop")
"""``copy``: ``get_into`` of a random block. ``put``: of a new block, which takes an old
one's place. ``view``: a view taken and given back. ``contains``: ``contains_many``.
``memcpy`` and ``loop`` (of Python, in memory of its own) use no store: they show how
many processors this machine really gives."""

_LEAD_SECONDS = 0.02  # to wake up, before all begin


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """What one worker does."""

    load: str
    count: int
    """Blocks that were stored: of the keys ``generators.key(0 .. count-1)``."""
    nbytes: int
    seconds: float
    seed: int
    """Different for each worker and each job: new blocks have it in their keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """What was done, a second."""

    operations: float
    """Blocks copied, stored or viewed; keys looked up."""
    nbytes: float
    missed: float

    @classmethod
    def total(cls, rates: Sequence[Rate]) -> Rate:
        """Return the sum."""
        return cls(
            sum(rate.operations for rate in rates),
            sum(rate.nbytes for rate in rates),
            sum(rate.missed for rate in rates),
        )


def _steps(cache: Cache, job: Job) -> Any:
    """Return a function that does a piece: (operations, bytes, misses)."""
    nbytes, choice = job.nbytes, random.Random(job.seed)
    keys = [generators.key(index) for index in range(job.count)]
    order = [choice.randrange(job.count) for _ in range(4096)]
    turn = iter(range(1 << 60))

    def copy() -> tuple[int, int, int]:
        found = cache.get_into(keys[order[next(turn) & 4095]], target)
        return (0, 0, 1) if found is None else (1, found, 0)

    def put() -> tuple[int, int, int]:
        stored = cache.put(struct.pack("<QQQQ", job.seed, next(turn), 0, 1), data)
        return (1, nbytes, 0) if stored else (0, 0, 1)

    def view() -> tuple[int, int, int]:
        found = 0
        for _ in range(64):
            found += cache.get(keys[order[next(turn) & 4095]]) is not None
        return found, 0, 64 - found

    def contains() -> tuple[int, int, int]:
        found = sum(cache.contains_many(rows))
        return found, 0, CONTAINS_BATCH - found

    def memcpy() -> tuple[int, int, int]:
        np.copyto(into, pieces[next(turn) % len(pieces)])
        return 1, nbytes, 0

    def loop() -> tuple[int, int, int]:
        for _ in range(1000):
            pass
        return 1000, 0, 0

    if job.load == "memcpy":
        pieces = np.ones((job.count, nbytes), dtype=np.uint8)
        into = np.zeros(nbytes, dtype=np.uint8)
    elif job.load == "copy":
        target = memoryview(np.zeros(nbytes + 16, dtype=np.uint8)[16:].data)
    elif job.load == "put":
        data = np.random.default_rng(job.seed).bytes(nbytes)
    elif job.load == "contains":
        rows = b"".join(keys[order[i]] for i in range(CONTAINS_BATCH))
    steps = (copy, put, view, contains, memcpy, loop)
    return dict(zip(LOADS, steps, strict=True))[job.load]


def _work(step: Any, begin: float, seconds: float) -> Rate:
    clock = time.perf_counter
    while clock() < begin - 0.002:
        time.sleep(0.001)
    while clock() < begin:
        pass
    operations = nbytes = missed = 0
    end = begin + seconds
    while True:
        done, moved, absent = step()
        operations += done
        nbytes += moved
        missed += absent
        now = clock()
        if now >= end:
            break
    spent = now - begin
    return Rate(operations / spent, nbytes / spent, missed / spent)


def run_threads(cache: Cache, jobs: Sequence[Job]) -> list[Rate]:
    """Do each job in a thread of its own, all at once."""
    steps = [_steps(cache, job) for job in jobs]
    found: list[Rate | BaseException] = [Rate(0, 0, 0)] * len(jobs)

    def run(place: int) -> None:
        try:
            found[place] = _work(steps[place], begin, jobs[place].seconds)
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(jobs))]
    begin = time.perf_counter() + _LEAD_SECONDS
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [_rate(rate) for rate in found]


def _rate(answer: Rate | BaseException) -> Rate:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, path: Path) -> None:
    """Be a worker process: a job comes, then the moment to begin; a rate goes back."""
    with Cache.open(path, CacheConfig(sync_interval=None)) as cache:
        pipe.send("open")
        while True:
            job = pipe.recv()
            if job is None:
                return
            try:
                step = _steps(cache, job)
                pipe.send("ready")
                pipe.send(_work(step, pipe.recv(), job.seconds))
            except BaseException as error:
                pipe.send(error)


class Team:
    """Worker processes with one volume open; a context manager."""

    def __init__(self, path: Path, size: int) -> None:
        # Not fork: a handle that was open before it refuses to work in the child.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, path), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, jobs: Sequence[Job]) -> list[Rate]:
        """Do each job in a process of its own, all at once; the others sleep."""
        pipes = self._pipes[: len(jobs)]
        for pipe, job in zip(pipes, jobs, strict=True):
            pipe.send(job)
        for pipe in pipes:
            answer = pipe.recv()
            if answer != "ready":
                raise answer
        begin = time.perf_counter() + _LEAD_SECONDS
        for pipe in pipes:
            pipe.send(begin)
        return [_rate(pipe.recv()) for pipe in pipes]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            try:
                pipe.send(None)
            except OSError:  # it died
                process.terminate()
            process.join(10)
            pipe.close()
