#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# gpu_run.sh: on a machine with a CUDA device, build, test and measure; 8 minutes at most.
#
#     bench/gpu_run.sh                 everything; the table comes last
#     bench/gpu_run.sh --wheels DIR    elsewhere, beforehand: fetch what such a machine
#                                      may lack into DIR (PYTHON_VERSION=3.12)
#
# Fetches nothing: it takes the system's python3 (PYTHON=...), gcc and the packages that
# are there.  Wheels in WHEELS (default .wheels) are installed beside them first.  What is
# missing is said, and what cannot run without it is left out in words.
# OUT (default build/gpu-run) gets the log, the record and the picture.
#
#     FAKE=1 bench/gpu_run.sh          a dry run anywhere: the fake driver of the tests
#                                      takes the place of the device, sizes are tiny, and
#                                      no number that it prints is a measurement
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=${WHEELS:-.wheels}
LIMIT=${LIMIT:-480}
OUT=${OUT:-build/gpu-run}

if [ "${1:-}" = --wheels ]; then
    exec "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: \
        --python-version "${PYTHON_VERSION:-3.12}" --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest "${2:?where to}" \
        cffi pycparser lmdb 'setuptools>=77' click \
        pytest iniconfig packaging pluggy pygments hypothesis sortedcontainers \
        rich markdown-it-py mdurl
fi

mkdir -p "$OUT"
started=$SECONDS
left() { echo $((LIMIT - (SECONDS - started))); }
step() { printf '\n==== %s (%d s left)\n' "$*" "$(left)"; }
exec > >(tee "$OUT/log") 2>&1
failed=()

step "the machine"
nvidia-smi --query-gpu=name,driver_version,pci.bus_id,memory.total --format=csv ||
    echo "nvidia-smi is missing or failed"
uname -srm
free -g | head -2
df -h . /dev/shm 2>/dev/null
ulimit -l | sed 's/^/locked memory, KiB: /'
cat /sys/fs/cgroup/memory.max 2>/dev/null | sed 's/^/memory.max: /'
nproc
"$PYTHON" --version || { echo "FAILED: there is no $PYTHON; set PYTHON"; exit 2; }

if compgen -G "$WHEELS/*.whl" >/dev/null; then
    step "wheels of $WHEELS"
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-cache-dir --upgrade \
        --target build/gpu-site "$WHEELS"/*.whl ||
        failed+=("wheels: pip could not install those of $WHEELS (made for this Python?)")
    export PYTHONPATH="$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}"
fi

step "what is there"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" - <<'PY'
import importlib
needed = {
    "setuptools": "the build (77 or newer)",
    "cffi": "everything on the device",
    "numpy": "tests and bench",
    "pytest": "tests",
    "hypothesis": "tests (their conftest)",
    "click": "bench",
    "rich": "bench",
    "lmdb": "the bench's LMDB column",
    "matplotlib": "the picture",
    "torch": "tests of tensors",
    "cupy": "tests of arrays",
}
for name, what in needed.items():
    try:
        module = importlib.import_module(name)
        print(f"  {name} {getattr(module, '__version__', '')}")
    except Exception as error:
        print(f"  {name} is MISSING, needed for {what}: {error}")
PY

step "build"
"$PYTHON" setup.py --quiet build_ext --inplace --force || {
    echo "FAILED: build, see above; it needs a C compiler, Python's headers and" \
        "setuptools 77 or newer"
    [ ${#failed[@]} -eq 0 ] || printf 'FAILED: %s\n' "${failed[@]}"
    exit 2
}

# On this interpreter both halves run: the logic on the fake driver, then the device.
step "tests on the fake driver"
timeout 120 "$PYTHON" -m pytest -q -x tests/gpu -p no:cacheprovider \
    --ignore tests/gpu/test_hardware.py -o addopts= ||
    failed+=("tests on the fake driver: see above")

if [ -n "${FAKE:-}" ]; then
    step "the tests of the device, on the fake driver"
    CYCLONE_KV_TEST_CUDA_DRIVER=$("$PYTHON" -c \
        'import sys; sys.path.insert(0, "tests"); from gpu import fake; print(fake.build())')
    export CYCLONE_KV_TEST_CUDA_DRIVER
    gpu=fake
else
    step "tests on the device"
    gpu=1
fi
CKV_GPU=$gpu timeout 150 "$PYTHON" -m pytest -q -s tests/gpu/test_hardware.py \
    -p no:cacheprovider -o addopts= -W default -rs ||
    failed+=("tests on the device: see above")

step "bench"
budget=$(($(left) - 10))
: >"$OUT/bench.log"
if [ "$budget" -gt 0 ]; then
    timeout "$budget" "$PYTHON" -m bench.gpu_upload --folder build/gpu-bench \
        ${FAKE:+--tiny} --output "$OUT/gpu-upload.jsonl" >"$OUT/bench.log" 2>&1
    case $? in
        0) ;;
        124) failed+=("bench: it took longer than the $budget s that were left") ;;
        *) failed+=("bench: it ended with an error, the last lines of $OUT/bench.log")
           tail -25 "$OUT/bench.log" ;;
    esac
    rm -rf build/gpu-bench
else
    failed+=("bench: no time was left for it")
fi
# Without a device it ends well, and says so in a line.
grep 'was not run' "$OUT/bench.log" && failed+=("bench: nothing was measured, see above")

step "the table"
sed -n 's/ *$//; / blocks\( (a fake.*\)\{0,1\}$/,$p' "$OUT/bench.log"
printf '\n'
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
[ -z "${FAKE:-}" ] || echo "a dry run on a fake driver: nothing here is a measurement"
printf 'everything passed in %d s\n' $((SECONDS - started))
