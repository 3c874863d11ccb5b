# SPDX-License-Identifier: Apache-2.0
"""SIGKILL and SIGSTOP at every named step of the engine (cases B, F10; N1, N3, N5).

The list of steps is read from the source: a new one fails its test until a tour
(tour.py) reaches it, or the reason why none can is written down here.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from crash import cases_points
from crash.nursery import Nursery

NAMES = cases_points.names()

_OTHERS = "needs another process that is alive or has died; see the tests beside one"
_FIRST = "only who opens first does this; see the tests alone"
_DAMAGE = "follows damaged shared memory only, which no crash leaves behind"
_FULL = "needs fourteen live keys in two buckets, which are half full by construction"
_PREFIX = "needs the volume to evict by prefix; see the tests of chains"
_SET = "needs files of a set that were used apart; see the tests of two files"

NOWHERE = {"check.relink": _DAMAGE, "index.crowded": _FULL}
NOT_ALONE = {
    **NOWHERE,
    "check.suspect": _OTHERS,
    "check.totals": _OTHERS,
    "rebuild.namespace": _SET,
    "region.attach": _OTHERS,
    "region.attached": _OTHERS,
    "stripe.succeed": _OTHERS,
    "sweep.begin": _OTHERS,
    "sweep.end": _OTHERS,
    "sweep.hint": _OTHERS,
    "sweep.mask": _OTHERS,
    "sweep.strike": _OTHERS,
    "sweep.struck": _OTHERS,
}
NOT_BESIDE = {
    **NOWHERE,
    **{
        name: _FIRST
        for name in NAMES
        if name.startswith(("format.", "rebuild.")) or name == "open.format"
    },
    **{name: _PREFIX for name in NAMES if name.startswith(("prefix.", "density."))},
    **dict.fromkeys(
        (
            "open.ready",
            "open.rebuild",
            "open.region",
            "region.allocate",
            "region.create",
            "region.created",
            "region.published",
            "region.ready",
            "region.unlink",
            "region.write",
        ),
        _FIRST,
    ),
}
OF_TWO = [
    name
    for name in NAMES
    if name.startswith(("format.", "open.", "rebuild.")) and name != "rebuild.lost"
]


def _creates(point: str) -> bool:
    return point.startswith("format.") or point == "open.format"


def test_every_point_of_the_source_is_in_the_list():
    assert cases_points.places() == cases_points.named() > 100
    assert len(NAMES) > 100


def test_every_point_is_reached_by_some_test():
    assert set(NOT_ALONE) & set(NOT_BESIDE) - set(OF_TWO) == set(NOWHERE)
    assert set(NOT_ALONE) | set(NOT_BESIDE) <= set(NAMES), "a point is gone"


@pytest.mark.parametrize("point", [name for name in NAMES if name not in NOT_ALONE])
def test_n3_killed_alone_loses_or_damages_nothing(
    point_nursery: Nursery, volume_path: Path, point: str
):
    assert point_nursery.call(
        cases_points.kill_alone,
        path=volume_path,
        point=point,
        created=not _creates(point),
    ), f"no tour reaches {point}"


@pytest.mark.parametrize(
    "point",
    ["put.evicted", "put.piece", "put.written", "put.sealed", "put.published"],
)
def test_n3_killed_alone_while_evicting_leaves_no_damaged_block(
    point_nursery: Nursery, volume_path: Path, point: str
):
    assert point_nursery.call(
        cases_points.kill_while_evicting, path=volume_path, point=point
    ), f"nothing reaches {point}"


@pytest.mark.parametrize(
    "point",
    [
        "put.written",
        "put.sealed",
        "put.recorded",
        "put.indexed",
        "put.published",
        "put.shown",
        "kill.condemn",
        "kill.condemned",
        "index.erased",
        "kill.strike",
        "kill.struck",
    ],
)
def test_n3_killed_while_replacing_brings_back_what_was_removed_since(
    point_nursery: Nursery, volume_path: Path, point: str
):
    assert point_nursery.call(
        cases_points.kill_while_replacing, path=volume_path, point=point
    ), f"nothing reaches {point}"


@pytest.mark.parametrize("point", [name for name in NAMES if name not in NOT_BESIDE])
def test_f10_killed_beside_another_holds_nothing_up(
    point_nursery: Nursery, volume_path: Path, point: str
):
    assert point_nursery.call(
        cases_points.kill_beside_another, path=volume_path, point=point
    ), f"no tour reaches {point}"


@pytest.mark.stops
@pytest.mark.parametrize("point", [name for name in NAMES if name not in NOT_BESIDE])
def test_n5_stopped_holds_nobody_up_and_goes_on_unharmed(
    point_nursery: Nursery, volume_path: Path, point: str
):
    assert point_nursery.call(
        cases_points.stop_beside_another,
        path=volume_path,
        point=point,
        timeout=100 + 2 * cases_points.STOP_SECONDS,
    ), f"no tour reaches {point}"


_POLICIES = {
    "prefix": {"eviction": "prefix"},
    "adaptive": {"admission": "adaptive"},
    "second-touch": {"admission": "second-touch"},
}
_OF_POLICIES = [
    *(("prefix", name) for name in NAMES if name.startswith(("prefix.", "density."))),
    *(("adaptive", name) for name in NAMES if name.startswith("admission.")),
    ("second-touch", "policy.full"),
    ("second-touch", "policy.refuse"),
    ("second-touch", "admission.ghost"),
    *((policy, "put.evicted") for policy in _POLICIES),
    *((policy, "kill.condemned") for policy in _POLICIES),
    *((policy, "put.published") for policy in _POLICIES),
]


@pytest.mark.stops
@pytest.mark.parametrize("action", ["stop", "kill"])
@pytest.mark.parametrize(("policy", "point"), _OF_POLICIES)
def test_n5_stopped_or_killed_among_processes_of_one_policy(
    point_nursery: Nursery, volume_path: Path, policy: str, point: str, action: str
):
    reached = point_nursery.call(
        cases_points.stop_with,
        path=volume_path,
        point=point,
        options=_POLICIES[policy],
        action=action,
        timeout=100 + 3 * cases_points.STOP_SECONDS,
    )
    assert reached, f"nothing reaches {point}"


@pytest.mark.stops
@pytest.mark.parametrize("policy", ["clock", *_POLICIES])
@pytest.mark.parametrize("number", range(3))
def test_n5_one_is_killed_while_another_is_stopped(
    point_nursery: Nursery,
    volume_path: Path,
    rng: random.Random,
    effort: float,
    policy: str,
    number: int,
):
    # Who is stopped under the open lock is waited for by every open: not the first.
    later = ("open.", "region.", "slot.", "sweep.", "file.")
    second = [name for name in NAMES if name not in NOT_BESIDE]
    first = [name for name in second if not name.startswith(later)]
    for _ in range(max(1, round(effort))):
        folder = volume_path.with_name(f"{rng.getrandbits(32):x}")
        folder.mkdir()
        point_nursery.call(
            cases_points.two_at_once,
            path=folder / "kv.cyc",
            first=rng.choice(first),
            second=rng.choice(second),
            options=_POLICIES.get(policy, {}),
            timeout=100 + 4 * cases_points.STOP_SECONDS,
        )


@pytest.mark.stops
def test_n2_n5_a_holder_of_views_is_stopped_and_killed(
    point_nursery: Nursery, volume_path: Path
):
    point_nursery.call(
        cases_points.hold_views,
        path=volume_path,
        rounds=2,
        timeout=100 + 4 * cases_points.STOP_SECONDS,
    )


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize(
    "point",
    [
        *(name for name in NAMES if name.startswith(("prefix.", "density."))),
        "kill.condemned",
        "put.occupy",
        "put.evicted",
        "put.published",
    ],
)
def test_killed_among_chains_leaves_hints_and_nothing_else(
    point_nursery: Nursery, volume_path: Path, point: str, count: int
):
    reached = point_nursery.call(
        cases_points.kill_among_chains, path=volume_path, point=point, count=count
    )
    assert reached or count > 1, f"no chain reaches {point}"


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", OF_TWO)
def test_f2_killed_creator_of_a_set_of_two_is_succeeded(
    point_nursery: Nursery, volume_path: Path, point: str, count: int
):
    reached = point_nursery.call(
        cases_points.kill_in_set_of_two,
        folder=volume_path.parent,
        point=point,
        count=count,
    )
    assert reached or count > 1, f"no tour reaches {point}"
