#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# connector_env.sh NAME: an environment of its own for the engine that a connector needs.
#
#     scripts/connector_env.sh vllm      makes .venv-vllm from requirements-vllm.txt, and
#                                        from requirements-vllm-bare.txt without what
#                                        the packages in it ask for
#     scripts/connector_env.sh sglang    the same for SGLang
#     scripts/connector_env.sh router    routers that steer by events: 0.4 GB, no torch
#
# An engine takes 2.5 to 3.5 GB and a minute or two, once: a marker in the folder
# remembers what it was made from, and another list makes it anew.  TORCH names the build
# of torch, for example TORCH='torch==2.13.0 --index-url <a CPU-only index>'.
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
list=scripts/requirements-$name.txt
bare=scripts/requirements-$name-bare.txt
folder=.venv-$name
torch=${TORCH:-torch==2.13.0}
if [ -e "$bare" ]; then
    source=$(cat "$list" "$bare" && echo "$torch")
else
    source=$(cat "$list")
fi
marker=$folder/made-from-$(echo "$source" | cksum | cut -d ' ' -f 1)

[ ! -e "$marker" ] || exit 0
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check --quiet)
if [ ! -e "$bare" ]; then
    "${pip[@]}" install -r "$list"
    touch "$marker"
    exit 0
fi
# TORCH may hold options of pip, so it is split into words.
# shellcheck disable=SC2086
"${pip[@]}" install $torch
# shellcheck disable=SC2086
"${pip[@]}" install -r "$list" ${torch%% *}
# Their builds are for CUDA and fail to import beside a torch for CPUs; text needs none.
"${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
"${pip[@]}" install --no-deps -r "$bare"
"$folder/bin/python" -c "import importlib.util as u, sys
sys.exit(not u.find_spec('$name'))"
touch "$marker"
