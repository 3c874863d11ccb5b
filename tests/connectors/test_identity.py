# SPDX-License-Identifier: Apache-2.0
"""The namespace of a setting: one for each setting, and the same one everywhere."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from cyclone_kv.connectors._identity import Identity, canonical_json

BASE = Identity(
    connector="example",
    connector_version=1,
    model="SmolLM2-135M-Instruct",
    weights="sha256:b179c952",
    kv_dtype="bfloat16",
    layout="HND",
    block_tokens=256,
    tp_rank=1,
    tp_size=2,
    rope={"rope_type": "default", "rope_theta": 100000.0, "factor": None},
    extra={"b": 2, "a": "één"},
)

# Written by hand: the encoding is a contract, not whatever the code does today.
BASE_CANONICAL = (
    '{"block_tokens":256,"cache_salt":"","connector":"example","connector_version":1,'
    '"cp_rank":0,"cp_size":1,"dp_rank":0,"dp_size":1,'
    '"extra":{"a":"\\u00e9\\u00e9n","b":2},"format":1,"group":0,"kv_dtype":"bfloat16",'
    '"layout":"HND","lora":"","model":"SmolLM2-135M-Instruct","pp_rank":0,"pp_size":1,'
    '"rope":"{\\"rope_theta\\":100000,\\"rope_type\\":\\"default\\"}","tp_rank":1,'
    '"tp_size":2,"weights":"sha256:b179c952"}'
)
BASE_DIGEST = "2b5efb481e52654c09ac29e98e2fc0ff8a9ca07086c36dc87f77600631e4aff5"
BASE_NAMESPACE = f"cyclone_kv/1/example/{BASE_DIGEST}"

# One other value for each field; the test fails when a new field has none.
OTHER_VALUES = {
    "connector": "example2",
    "connector_version": 2,
    "model": "SmolLM2-135M",
    "weights": "sha256:b179c953",
    "kv_dtype": "float16",
    "layout": "NHD",
    "block_tokens": 128,
    "tp_rank": 0,
    "tp_size": 4,
    "pp_rank": (("pp_rank", 1), ("pp_size", 2)),
    "pp_size": 2,
    "cp_rank": (("cp_rank", 1), ("cp_size", 2)),
    "cp_size": 2,
    "dp_rank": (("dp_rank", 1), ("dp_size", 2)),
    "dp_size": 2,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
    "lora": "poet@3",
    "cache_salt": "tenant-a",
    "group": 1,
    "extra": {"b": 2, "a": "een"},
}


def changed(name: str) -> Identity:
    value = OTHER_VALUES[name]
    changes = dict(value) if isinstance(value, tuple) else {name: value}
    return replace(BASE, **changes)


def test_canonical_text_is_the_golden_one():
    assert BASE.canonical() == BASE_CANONICAL


def test_namespace_is_the_golden_one():
    digest = hashlib.sha256(BASE_CANONICAL.encode()).hexdigest()
    assert BASE.namespace() == f"cyclone_kv/1/example/{digest}" == BASE_NAMESPACE


def test_namespace_of_defaults_is_the_golden_one():
    identity = Identity(
        connector="vllm",
        connector_version=3,
        model="m",
        weights="w",
        kv_dtype="fp8_e4m3",
        layout="l",
        block_tokens=16,
    )
    digest = "7b049e776d335cb93cffdec276398625170e2d970b155029bd11798bee853331"
    assert identity.namespace() == f"cyclone_kv/1/vllm/{digest}"


@pytest.mark.parametrize("name", [item.name for item in fields(Identity)])
def test_every_field_changes_the_namespace(name):
    assert changed(name).namespace() != BASE.namespace()


def test_no_two_changes_meet():
    namespaces = [changed(item.name).namespace() for item in fields(Identity)]
    namespaces.append(BASE.namespace())
    assert len(set(namespaces)) == len(namespaces)


def test_fields_do_not_run_into_each_other():
    one = replace(BASE, model="a", weights="bc")
    two = replace(BASE, model="ab", weights="c")
    three = replace(BASE, lora='x","model":"y')
    assert len({i.namespace() for i in (one, two, three, BASE)}) == 4


def test_namespace_is_the_same_in_every_process():
    code = (
        "from cyclone_kv.connectors._identity import Identity\n"
        "print(Identity(connector='example', connector_version=1,\n"
        "    model='SmolLM2-135M-Instruct', weights='sha256:b179c952',\n"
        "    kv_dtype='bfloat16', layout='HND', block_tokens=256,\n"
        "    tp_rank=1, tp_size=2,\n"
        "    rope={'rope_theta': 100000, 'rope_type': 'default'},\n"
        "    extra={'a': '\\u00e9\\u00e9n', 'b': 2}).namespace())\n"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    for seed in (None, "0", "1", "random"):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment["PYTHONPATH"] = path
        if seed is not None:
            environment["PYTHONHASHSEED"] = seed
        output = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert output.strip() == BASE_NAMESPACE, f"PYTHONHASHSEED={seed}"


@pytest.mark.parametrize("name", ["rope", "lora", "cache_salt"])
def test_absent_is_one_value(name):
    given = replace(BASE, **{name: ""})
    assert replace(BASE, **{name: None}) == given
    assert replace(BASE, **{name: None}).namespace() == given.namespace()


def test_order_of_mappings_does_not_matter():
    other = replace(
        BASE,
        rope={"rope_theta": 100000, "rope_type": "default"},
        extra={"a": "één", "b": 2},
    )
    assert other == BASE
    assert hash(other) == hash(BASE)


def test_salt_is_shown_nowhere():
    identity = replace(BASE, cache_salt="hunter2")
    assert "hunter2" not in repr(identity)
    assert "hunter2" not in identity.namespace()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"connector": ""}, "connector"),
        ({"connector": "a/b"}, "connector"),
        ({"model": ""}, "model is empty"),
        ({"weights": ""}, "weights is empty"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"connector_version": 0}, "connector_version is 0"),
        ({"group": -1}, "group is -1"),
        ({"tp_rank": 2}, "tp_rank is 2 of tp_size 2"),
        ({"pp_size": 0}, "pp_size is 0"),
        ({"rope": {"factor": float("nan")}}, "finite"),
        ({"extra": (("a", 1), ("a", 2))}, "twice"),
    ],
)
def test_impossible_values_are_refused_in_words(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"connector": None},
        {"model": None},
        {"layout": b"HND"},
        {"block_tokens": 256.0},
        {"tp_rank": True},
        {"lora": 3},
        {"rope": 10000},
        {"rope": {"factor": object()}},
        {"rope": {1: "a"}},
        {"extra": {"a": 1.5}},
        {"extra": {"a": None}},
        {"extra": {1: "a"}},
    ],
)
def test_wrong_types_are_refused(changes):
    with pytest.raises(TypeError):
        replace(BASE, **changes)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1, "1"),
        (1.0, "1"),
        (-0.0, "0"),
        (0.1, "0.1"),
        (1e-05, "1e-05"),
        (2**70, "1180591620717411303424"),
        ("a\u00e9\U0001f600", '"a\\u00e9\\ud83d\\ude00"'),
        ([1, (2, 3)], "[1,[2,3]]"),
        ({"b": 1, "a": {"d": None, "c": 2.5}}, '{"a":{"c":2.5},"b":1}'),
    ],
)
def test_canonical_json_spells_values_one_way(value, text):
    assert canonical_json(value) == text


@pytest.mark.parametrize("value", [b"bytes", {1, 2}, object(), {1: 2}])
def test_canonical_json_refuses_what_has_no_exact_spelling(value):
    with pytest.raises(TypeError):
        canonical_json(value)
