# SPDX-License-Identifier: Apache-2.0
"""Plans, round trips and bounds of the layout; extents against plain Python."""

from __future__ import annotations

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from models import GIB, MIB, OK, PAGE

TIB = 1 << 40
E_INVALID, E_FORMAT = -1, -4

CAPACITIES = st.one_of(
    st.integers(16 * MIB, 8 * TIB),
    st.integers(16 * MIB, 300 * MIB),
    st.integers(24, 43).flatmap(
        lambda bits: st.integers(-70000, 70000).map(lambda d: (1 << bits) + d)
    ),
).filter(lambda capacity: 16 * MIB <= capacity <= 8 * TIB)
STRIPES = st.one_of(st.integers(0, 300), st.sampled_from([0, 1, 2, 3, 4, 8, 255, 256]))
EXPECTED = st.one_of(
    st.just(0),
    st.integers(PAGE, 64 * MIB),
    st.sampled_from([PAGE, 65536, MIB, 2**64 - 1]),
)
FIELDS = [
    "file_bytes",
    "namespaces_offset",
    "checkpoint_offset",
    "checkpoint_bytes",
    "table_offset",
    "table_bytes",
    "data_offset",
    "data_bytes",
    "stripe_bytes",
    "stripe_count",
    "stripe_entries",
    "entry_count",
    "granule_bytes",
]
IN_HEADER = [name for name in FIELDS if name != "stripe_entries"]


def plan(core, capacity: int, stripes: int = 0, expected: int = 0):
    geometry = core.ffi.new("struct ckv_geometry *")
    error = core.ffi.new("struct ckv_error *")
    status = core.lib.ckv_geometry_plan(capacity, stripes, expected, geometry, error)
    return (geometry if status == OK else None), int(status), error


def dump(geometry) -> dict[str, int]:
    return {name: int(getattr(geometry, name)) for name in FIELDS}


@given(CAPACITIES, STRIPES, EXPECTED)
@example(16 * MIB, 3, MIB)
@example(16 * MIB, 4, 0)
@example(8 * TIB, 256, MIB)
@example(8 * TIB, 1, 0)
@example(4 * TIB, 0, PAGE)
@example(4 * TIB + 1, 0, 0)
def test_what_is_planned_is_read_back(core, capacity, stripes, expected):
    geometry, status, error = plan(core, capacity, stripes, expected)
    if geometry is None:
        assert status == E_INVALID
        assert core.ffi.string(error.text)
        too_many = stripes > 256 or (stripes and capacity // stripes < 4 * MIB)
        assert too_many or capacity / min(max(expected, PAGE), MIB) > 2**30 / 2
        return
    g = dump(geometry)
    # G1
    assert g["data_bytes"] == g["stripe_count"] * g["stripe_bytes"] <= capacity
    assert g["stripe_bytes"] % g["granule_bytes"] == 0
    assert capacity - g["data_bytes"] < g["stripe_count"] * g["granule_bytes"]
    assert g["data_bytes"] >= capacity // 2
    assert stripes in (0, g["stripe_count"])
    assert g["granule_bytes"] in {PAGE << i for i in range(9)}
    if expected:
        assert g["granule_bytes"] == min(MIB, 1 << expected.bit_length() - 1)
    # G2
    assert g["entry_count"] == g["stripe_count"] * g["stripe_entries"]
    assert g["stripe_entries"] * g["granule_bytes"] == g["stripe_bytes"]
    assert 0 < g["entry_count"] <= 2**30
    # G3
    areas = [
        (0, 4 * PAGE),
        (g["namespaces_offset"], 256 * 4 * 64),
        (g["checkpoint_offset"], 2 * g["checkpoint_bytes"]),
        (g["table_offset"], g["table_bytes"]),
        (g["data_offset"], g["data_bytes"]),
    ]
    end = 0
    for offset, length in areas:
        assert offset % PAGE == 0
        assert offset >= end
        end = offset + length
    assert end == g["file_bytes"]
    assert g["checkpoint_bytes"] >= PAGE + g["entry_count"] * 7
    assert g["table_bytes"] >= 80 * g["entry_count"]
    # what it costs beside the data: at 64 KiB an entry, less than a fifth of a percent
    if g["granule_bytes"] >= 65536 and g["data_bytes"] > 8 * GIB:
        assert g["data_offset"] < g["data_bytes"] / 500

    header = core.ffi.new("struct ckv_file_header *")
    core.lib.ckv_geometry_write(geometry, header)
    again = core.ffi.new("struct ckv_geometry *")
    assert core.lib.ckv_geometry_read(header, again, error) == OK
    assert dump(again) == g


@given(CAPACITIES, STRIPES, EXPECTED, st.data())
def test_no_other_header_is_believed(core, capacity, stripes, expected, data):
    geometry, _, error = plan(core, capacity, stripes, expected)
    assume(geometry is not None)
    header = core.ffi.new("struct ckv_file_header *")
    core.lib.ckv_geometry_write(geometry, header)
    for _ in range(3):
        name = data.draw(st.sampled_from(IN_HEADER))
        width = 32 if name in ("stripe_count", "entry_count", "granule_bytes") else 64
        before = int(getattr(header, name))
        value = data.draw(
            st.one_of(
                st.integers(0, 2**width - 1),
                st.sampled_from([0, 1, 2**width - 1, 2 ** (width - 1)]),
                st.integers(0, width - 1).map(lambda bit, b=before: b ^ 1 << bit),
                st.sampled_from([before * 2 % 2**width, before // 2]),
            )
        )
        setattr(header, name, value)
    again = core.ffi.new("struct ckv_geometry *")
    status = core.lib.ckv_geometry_read(header, again, error)
    if status == OK:  # then it is one that could have been planned
        g = dump(again)
        assert g["data_bytes"] == g["stripe_count"] * g["stripe_bytes"]
        assert 0 < g["data_bytes"] <= 8 * TIB
        assert g["entry_count"] == g["data_bytes"] // g["granule_bytes"]
        assert g["file_bytes"] == g["data_offset"] + g["data_bytes"]
        assert all(int(getattr(header, name)) == g[name] for name in IN_HEADER)
    else:
        assert status == E_FORMAT
        assert core.ffi.string(error.text)


@pytest.mark.parametrize(
    ("capacity", "stripes", "expected"),
    [
        (16 * MIB - 1, 0, 0),
        (0, 0, 0),
        (8 * TIB + 1, 0, 0),
        (2**64 - 1, 0, 0),
        (64 * MIB, 17, 0),
        (64 * MIB, 2**32 - 1, 0),
        (8 * TIB, 257, 0),
        (64 * MIB, 0, PAGE - 1),
        (64 * MIB, 0, 1),
        (8 * TIB, 0, PAGE),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(core, capacity, stripes, expected):
    geometry, status, error = plan(core, capacity, stripes, expected)
    assert geometry is None
    assert status == E_INVALID
    text = core.ffi.string(error.text).decode()
    assert str(capacity) in text or str(stripes) in text or str(expected) in text


def pieces(first: int, end: int) -> list[int]:
    """Lengths of the parts of [first, end) between borders of 1 GiB."""
    found = []
    while first < end:
        border = min((first // GIB + 1) * GIB, end)
        found.append(border - first)
        first = border
    return found


@given(CAPACITIES, STRIPES)
@example(5 * GIB, 4)
@example(10_000_000_000, 4)
def test_largest_payload(core, capacity, stripes):
    geometry, _, _ = plan(core, capacity, stripes, MIB)
    assume(geometry is not None)
    size = int(geometry.stripe_bytes)
    if size > 64 * GIB:
        assert core.lib.ckv_geometry_payload_max(geometry) == GIB
        return
    expected = min(
        max(pieces(s * size, (s + 1) * size)) for s in range(geometry.stripe_count)
    )
    assert core.lib.ckv_geometry_payload_max(geometry) == expected


@given(CAPACITIES, STRIPES, st.data())
def test_extents(core, capacity, stripes, data):
    """Inside one stripe and one GiB, whatever the numbers are."""
    geometry, _, _ = plan(core, capacity, stripes, MIB)
    assume(geometry is not None)
    stripe = int(geometry.stripe_bytes)
    count = int(geometry.data_bytes) // PAGE
    marks = [0, count, stripe // PAGE, GIB // PAGE, 2**31, 2**32 - 1]
    marks += [m * GIB // PAGE for m in (2, 4, 8, 64)]
    near = st.sampled_from(marks).flatmap(
        lambda mark: st.integers(-3, 3).map(lambda d: (mark + d) % 2**32)
    )
    number = st.one_of(near, st.integers(0, 2**32 - 1), st.integers(0, count))
    for _ in range(10):
        first, pages = (
            data.draw(number),
            data.draw(st.one_of(number, st.integers(0, 4))),
        )
        begin, end = first * PAGE, (first + pages) * PAGE
        valid = (
            pages > 0
            and end <= geometry.data_bytes
            and begin // stripe == (end - 1) // stripe
            and begin // GIB == (end - 1) // GIB
        )
        assert core.lib.ckv_geometry_extent_valid(geometry, first, pages) == valid


@given(
    st.lists(st.tuples(CAPACITIES, STRIPES, EXPECTED), min_size=1, max_size=16),
    st.sampled_from([64, 1024, 1 << 24]),
    st.sampled_from([0, 1]),
)
def test_region(core, files, events, eviction):
    """Its arrays follow each other, are large enough and hold at most half a load."""
    rows = core.ffi.new("struct ckv_geometry[]", len(files))
    entries = granules = stripes = 0
    for row, arguments in zip(rows, files, strict=True):
        geometry, _, _ = plan(core, *arguments)
        assume(geometry is not None)
        core.ffi.memmove(core.ffi.addressof(row), geometry, core.ffi.sizeof(row))
        entries += geometry.entry_count
        granules += geometry.data_bytes // geometry.granule_bytes
        stripes += geometry.stripe_count
    layout = core.ffi.new("struct ckv_region_layout *")
    error = core.ffi.new("struct ckv_error *")
    status = core.lib.ckv_region_layout_plan(
        rows, len(files), events, eviction, layout, error
    )
    if entries > 2**31:
        assert status == E_INVALID
        return
    assert status == OK
    assert (layout.entry_count, layout.stripe_count) == (entries, stripes)
    assert (layout.granule_count, layout.path_count) == (granules, len(files))
    buckets = int(layout.bucket_count)
    assert 2 * entries <= buckets * 7 < 2 * entries + 21
    size = core.ffi.sizeof
    areas = [
        ("slots", 64 * size("struct ckv_slot")),
        ("namespaces", 256 * size("struct ckv_namespace")),
        ("paths", 16 * size("struct ckv_shared_path")),
        ("stripes", stripes * size("struct ckv_stripe")),
        ("hints", core.lib.CKV_HINTS * size("struct ckv_hint")),
        ("events", events * 64),
        ("buckets", buckets * 64),
        ("states", entries * 8),
        ("masks", entries * 8),
        ("places", entries * 8),
        ("marks", entries * 4),
        ("links", entries * 4),
        ("page_map", granules * 4),
        ("heats", entries),
        ("owners", entries),
        ("admission", core.lib.ckv_admission_bytes(entries)),
    ]
    if eviction:
        areas += [
            ("chains", entries * 8),
            ("lives", entries * 8),
            ("leaves", (granules + 63) // 64 * 8),
            ("density", core.lib.ckv_density_bytes(entries)),
        ]
    end = size("struct ckv_region_header")
    for name, length in areas:
        offset = int(getattr(layout, f"{name}_offset"))
        assert offset % PAGE == 0
        assert offset >= end
        end = offset + length
    assert end <= layout.region_bytes < end + PAGE


def test_memory_of_an_entry(core):
    """Design 5: at 64 KiB an entry, at most 160 bytes of memory each."""
    geometry, _, _ = plan(core, 1 * TIB)
    layout = core.ffi.new("struct ckv_region_layout *")
    error = core.ffi.new("struct ckv_error *")
    plan_region = core.lib.ckv_region_layout_plan
    assert plan_region(geometry, 1, 16384, 0, layout, error) == OK
    private = 8 * layout.entry_count
    total = geometry.table_bytes + layout.region_bytes + private
    assert total / layout.entry_count <= 160
    without = int(layout.region_bytes)
    assert plan_region(geometry, 1, 16384, 1, layout, error) == OK
    assert (layout.region_bytes - without) / layout.entry_count < 40  # what chains cost
