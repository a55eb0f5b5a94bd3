#!/usr/bin/env bash
# Builds the CPU engine, runs every test and times the engine, on a machine with a GPU and no network.
# Needs python3 with torch, transformers, typer, rich, pytest, hypothesis, cmake and ninja.
# Usage: scripts/gpu_suite.sh OUTPUT_FOLDER
set -uo pipefail
out=${1:?output folder}
mkdir -p "$out"
cd "$(dirname "$0")/.."
cmake -S src/greenroom/kernels/cpu -B build/gpu-suite -G Ninja -DCMAKE_BUILD_TYPE=Release >"$out/build.log" 2>&1 &&
  ninja -C build/gpu-suite >>"$out/build.log" 2>&1 &&
  cp "$(find build/gpu-suite -name libgreenroom_cpu.so)" src/greenroom/kernels/cpu/ || { tail -20 "$out/build.log"; exit 1; }
export PYTHONPATH=src PYTHONUNBUFFERED=1
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader | tee "$out/machine.txt"
lscpu | grep -E 'Model name|^CPU\(s\)' | tee -a "$out/machine.txt"
python3 -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)' |
  tee -a "$out/machine.txt"
for tokens in 1 16 64 256 1024 4096; do
  python3 -m greenroom bench experts --tokens $tokens --json | tee -a "$out/bench.jsonl"
done
python3 -m pytest -q -p no:cacheprovider --durations=10 2>&1 | tee "$out/tests.log" |
  grep -vE 'Loading weights|Writing model' | tail -40
