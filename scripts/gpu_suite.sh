#!/usr/bin/env bash
# Builds the CPU engine, times the parts and runs every test, on a machine with a GPU and no network.
# Needs python3 with torch, transformers, typer, rich, pytest, pytest-xdist, hypothesis, cmake and ninja.
# Usage: scripts/gpu_suite.sh OUTPUT_FOLDER [COMMIT]
set -uo pipefail
out=${1:?output folder}
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1

build() {
  cmake -S src/greenroom/kernels/cpu -B build/gpu-suite -G Ninja -DCMAKE_BUILD_TYPE=Release &&
    ninja -C build/gpu-suite &&
    cp "$(find build/gpu-suite -name libgreenroom_cpu.so)" src/greenroom/kernels/cpu/
}
build >"$out/build.log" 2>&1 || { tail -20 "$out/build.log"; exit 1; }

{
  echo "commit ${2:-$(git rev-parse --short HEAD 2>/dev/null)}"
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  lscpu | grep -E 'Model name|^CPU\(s\)'
  python3 -c 'import sys, torch, transformers as t; print("python", sys.version.split()[0], "torch", torch.__version__, "transformers", t.__version__)'
} | tee "$out/machine.txt"

bench() { timeout 90 python3 -m greenroom bench "$@" --json | tee -a "$out/bench.jsonl"; }

timeout 200 python3 -m pytest -q -n 8 -p no:cacheprovider --durations=5 >"$out/tests.log" 2>&1
grep -vE 'Loading weights|Writing model' "$out/tests.log" | tail -30
bench bandwidth
for tokens in 1 16 1024 64 256 4096; do bench experts --tokens $tokens; done
bench decode --batch 1
bench prefill --tokens 512
bench decode --batch 16
bench prefill --tokens 3900
bench decode --batch 1 --cache-expert-num 128
