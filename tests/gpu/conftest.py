# SPDX-License-Identifier: Apache-2.0
"""A cache beside the fake driver; each test ends with nothing left of either."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.caches import Caches, OpenCache, key_of

from cyclone_kv import Cache
from cyclone_kv.cuda import driver, runtime

from .fake import Fake, build

# Without a device nothing of it is collected: see there.
collect_ignore = [] if os.environ.get("CKV_GPU") else ["test_hardware.py"]

__all__ = ["OpenCache", "key_of"]


@pytest.fixture(scope="session")
def loaded_fake() -> Fake:
    return Fake(build())


@pytest.fixture
def fake(loaded_fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """The fake with one device, in EAGER mode; the process has no runtime yet."""
    monkeypatch.setenv(driver.TEST_VARIABLE, str(loaded_fake.path))
    forget_runtime()
    loaded_fake.reset()
    yield loaded_fake
    forget_runtime()


def forget_runtime() -> None:
    old, runtime._runtime = runtime._runtime, None
    if old is not None:
        atexit.unregister(old._at_exit)


@pytest.fixture
def open_cache(fake: Fake, volume_path: Path) -> Iterator[OpenCache]:
    """Opens `volume_path`; afterwards the fake and the volume must be clean."""
    caches = Caches(volume_path)
    yield caches.open
    fake.succeed()
    fake.advance()
    caches.close()
    if runtime._runtime is not None:
        runtime._runtime.collect()
        assert runtime._runtime.volumes == {}
    assert fake.lib.fake_unmapped() == 0
    assert fake.violation == ""
    assert fake.registered_bytes == 0
    assert fake.pinned_bytes == 0
    assert fake.pending == 0
    assert fake.lib.fake_live_events() == 0
    assert fake.lib.fake_depth() == 0
    caches.verify()


@pytest.fixture
def cache(open_cache: OpenCache) -> Cache:
    return open_cache()


def payload_of(number: int, nbytes: int) -> bytes:
    """Bytes of which every word names the key and the place."""
    word = (number << 40).to_bytes(8, "little")
    words = np.arange(-(-nbytes // 8), dtype="<u8") + np.frombuffer(word, "<u8")
    return words.tobytes()[:nbytes]
