# SPDX-License-Identifier: Apache-2.0
"""The C extension: sources, flags and switches; everything else is in pyproject.toml.

Switches, all by environment variable:

CKV_WERROR=1                     the project's warnings, as errors
CKV_SANITIZE=address,undefined   or thread: build with sanitizers, for tests
CKV_POINTS=1                     compile pause points in, for tests
"""

from __future__ import annotations

import os
import sys
import sysconfig
from glob import glob

from setuptools import Extension, setup

if sys.platform == "win32":
    sys.exit("cyclone_kv needs Linux or macOS; Windows has none of the calls it uses.")

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wpedantic",
    "-Wshadow",
    "-Wconversion",
    "-Wsign-conversion",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wundef",
    "-Wcast-qual",
    "-Wcast-align=strict",
    "-Wpointer-arith",
    "-Wwrite-strings",
    "-Wvla",
    "-Wswitch-enum",
    "-Wformat=2",
    "-Wnull-dereference",
    "-Wimplicit-fallthrough",
]

# A build for free-threaded Python cannot use the stable ABI.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def is_set(name: str) -> bool:
    """Tell whether a switch is on."""
    return os.environ.get(name, "0") not in {"", "0"}


compile_args = ["-std=c17", "-O3", "-fvisibility=hidden", "-pthread"]
link_args = ["-pthread"]
# Python needs one symbol; those of the engine must not meet another copy of it.
if sys.platform == "darwin":
    link_args.append("-Wl,-exported_symbol,_PyInit__core")
else:
    link_args.append("-Wl,--version-script=csrc/python/exports.map")
macros: list[tuple[str, str | None]] = [("_GNU_SOURCE", None)]
if LIMITED_API:
    macros.append(("Py_LIMITED_API", "0x030B0000"))
if is_set("CKV_POINTS"):
    macros.append(("CKV_POINTS", None))
if is_set("CKV_WERROR"):
    compile_args += [*WARNINGS, "-Werror"]
    # The warnings are about our code: Python's headers are those of the system.
    compile_args += ["-isystem", sysconfig.get_paths()["include"]]
if sanitizers := os.environ.get("CKV_SANITIZE"):
    flag = f"-fsanitize={sanitizers}"
    compile_args += [flag, "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
    link_args.append(flag)

setup(
    ext_modules=[
        Extension(
            "cyclone_kv._core",
            sources=sorted(glob("csrc/core/*.c") + glob("csrc/python/*.c")),
            depends=sorted([*glob("csrc/*/*.h"), "csrc/python/exports.map"]),
            include_dirs=["csrc/include"],
            define_macros=macros,
            extra_compile_args=compile_args,
            extra_link_args=link_args,
            py_limited_api=LIMITED_API,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if LIMITED_API else {},
)
