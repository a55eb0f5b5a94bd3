#!/usr/bin/env bash
# Builds the CPU engine, then runs every test or one of the other parts, on a machine with a GPU and no network.
# Needs python3 with torch, transformers, typer, rich, pytest, pytest-xdist, hypothesis, cmake and ninja; the part
# `sanitizer` also compute-sanitizer; `vllm` and `two-gpus`, which are not in `all`, vLLM.
# Usage: [TRACE=FILE.npy] scripts/gpu_suite.sh tests|experts|model|memory|serving|split|soak|sanitizer|all|vllm|two-gpus OUTPUT_FOLDER
# TRACE: recorded routing for the half-cached model, which is drawn at random otherwise.
set -uo pipefail
what=${1:?tests, experts, model, memory, serving, split, soak, sanitizer, all, vllm or two-gpus}
out=${2:?output folder}
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1
wanted() { [ "$what" = all ] || [ "$what" = "$1" ]; }

build() {
  cmake -S src/greenroom/kernels/cpu -B build/gpu-suite -G Ninja -DCMAKE_BUILD_TYPE=Release &&
    ninja -C build/gpu-suite &&
    cp "$(find build/gpu-suite -name libgreenroom_cpu.so)" src/greenroom/kernels/cpu/
}
build >"$out/build.log" 2>&1 || { tail -20 "$out/build.log"; exit 1; }

{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
  lscpu | grep -E 'Model name|^CPU\(s\)'
  python3 -c 'import sys, torch, transformers as t; print("python", sys.version.split()[0], "torch", torch.__version__, "transformers", t.__version__)'
} | tee "$out/machine.txt"

bench() { timeout "${limit:-90}" python3 -m greenroom bench "$@" --json | tee -a "$out/bench.jsonl"; }
script() { timeout "${limit:-240}" python3 "scripts/$1.py" "${@:2}" | tee -a "$out/$1.jsonl" || status=1; }
sanitize() {
  timeout "${limit:-240}" compute-sanitizer --tool "$1" --target-processes all --error-exitcode 9 \
    python3 -m pytest -v -p no:cacheprovider tests/experts/test_decode_path.py tests/experts/test_landing.py -k "$2" \
    >"$out/$1.log" 2>&1 || status=1
  tail -3 "$out/$1.log"
}

status=0
if wanted tests; then
  # -v names each test as it ends, so that a log which is cut short still says what ran.
  python3 -m pytest -v -n 8 -p no:cacheprovider --durations=10 >"$out/tests.log" 2>&1 || status=1
  grep -E 'FAILED|ERROR|crashed|Fatal|passed|failed' "$out/tests.log" | tail -30
fi
if wanted experts; then
  bench bandwidth
  for tokens in 1 16 64 256 1024 4096; do bench experts --tokens $tokens; done
fi
if wanted model; then
  bench decode --batch 1 --batch 16
  bench prefill --tokens 512 --tokens 3900
  # Long enough for the cache to settle, and for a short trace to be seen more than once.
  bench decode --batch 1 --cache-expert-num 32 --steps 52 --routing "${TRACE:-uniform}"
  bench decode --batch 1 --cache-expert-num 128
  bench handoff
  limit=180 bench kernels
  # Writes 16 GB to a temporary folder first.
  limit=300 bench load --shape q30-12L
fi
if wanted memory; then
  limit=120 bench kv --part blocks
  limit=180 bench kv --part prefix --tokens 3500
  attention="--weights-offload-params self_attn"
  bench decode --batch 1
  bench decode --batch 1 --weights-offload-group-size 1 $attention
  bench decode --batch 1 --weights-offload-group-size 4 $attention
  bench decode --batch 1 --weights-offload-backend uva $attention
fi
if wanted serving; then
  limit=180 bench serving --cache-expert-num 32
  script plan_accuracy
fi
if wanted split; then
  script split_on_slow_cpus
  script split_on_slow_cpus --cores 4 --slow 1
  script split_on_slow_cpus --busy "$(nproc)" --slow 1
fi
if wanted soak; then
  python3 scripts/soak_decode.py >"$out/soak.log" 2>&1 || status=1
  tail -1 "$out/soak.log"
fi
if wanted sanitizer; then
  # A test takes many times as long under it, so only some of the decode path.
  few='(every_lane and 5-5) or divided_between and 37 or any_number or device_lands or enters_the_map or padding'
  few+=' or most_tokens or takes_ids or foreign'
  sanitize memcheck "$few"
  sanitize racecheck "$few"
fi
if [ "$what" = vllm ]; then
  limit=500 script compare_vllm speed uva plugin:0 stock plugin:128 stock --turns 30 --fast-dummy
fi
if [ "$what" = two-gpus ]; then
  limit=300 script vllm_over_http --fast-dummy
  limit=300 script compare_vllm tokens --tp 2 --together --slots 8 0
  limit=300 script compare_vllm speed plugin:0:2 plugin:0 --prompt 512 --fast-dummy
fi
exit $status
