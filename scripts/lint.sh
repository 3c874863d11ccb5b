#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lint.sh: everything that is checked without running the engine.
#
#     scripts/lint.sh           check
#     scripts/lint.sh --fix     let the formatters change the files
#
# Takes its tools from VENV (default .venv); `make lint` puts them there.
set -euo pipefail
cd "$(dirname "$0")/.."
bin="${VENV:-.venv}/bin"
python="$bin/python"

mapfile -t c_files < <(find csrc tests/core/stress tests/simulation -name '*.[ch]' | sort)
mapfile -t c_sources < <(find csrc/core csrc/python tests/core/stress -name '*.c' | sort)
python_files=(setup.py cyclone_kv tests bench examples scripts)
for name in "${!python_files[@]}"; do
    [ -e "${python_files[$name]}" ] || unset "python_files[$name]"
done

if [ "${1:-}" = --fix ]; then
    "$bin/clang-format" -i "${c_files[@]}"
    "$python" scripts/wrap_comments.py "${c_files[@]}"
    "$bin/ruff" format "${python_files[@]}"
    "$bin/ruff" check --fix "${python_files[@]}"
    exit
fi

step() { printf -- '-- %s\n' "$*"; }

step clang-format
"$bin/clang-format" --dry-run --Werror "${c_files[@]}"

step clang-tidy
database=$("$python" scripts/compile_database.py)
printf '%s\0' "${c_sources[@]}" |
    xargs -0 -n 1 -P "$(nproc)" "$bin/clang-tidy" --quiet -p "$database"

step ruff
"$bin/ruff" format --check "${python_files[@]}"
"$bin/ruff" check "${python_files[@]}"

step mypy
"$python" -m mypy cyclone_kv
# Before Python 3.12 arrays of numpy are buffers at run time only.
"$python" -m mypy --python-version 3.12 tests/typing
# tests/core is typed, but not strictly: it is followed, not judged.
MYPYPATH=tests:tests/core "$python" -m mypy --explicit-package-bases \
    --follow-imports silent tests/support scripts

step stubtest
"$python" -m mypy.stubtest cyclone_kv._core \
    --allowlist tests/python/stubtest.txt --ignore-unused-allowlist
