#!/usr/bin/env bash
# Both renderings on a GPU, in at most 5 minutes: parity with native XGBoost, latency and rows/s at 100, 1,000 and 10,000
# rows on CUDA, the crossover (bench/gpu.py). Prints JSON. Sets up what it needs by itself.
#
#   bench/gpu.sh              prepare (unless it is prepared), then measure on CUDA
#   bench/gpu.sh --prepare    only prepare; needs no GPU: for a GPU machine without package registries, take .run/gpu.npz along
#   bench/gpu.sh --dry        the CPU's provider in place of CUDA
#
#   PYTHON=python3    for the environments
#   WHEELS=folder     install the GPU side from wheels in this folder, without an index
#   JSON=file         write the result there as well
#
# Without a GPU the state is "not run" and the exit status 3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mode=${1:-}
input=.run/gpu.npz
export ORT_DISABLE_TELEMETRY=1 OMP_NUM_THREADS=1
unset PYTHONPATH
bench() {
  local python=$1
  shift
  "$python" -c 'import sys; sys.path.insert(0, "."); from bench.gpu import main; sys.exit(main(sys.argv[1:]))' "$@"
}

if [ "$mode" != --dry ] && [ "$mode" != --prepare ] && ! command -v nvidia-smi >/dev/null; then
  echo '{"state": "not run", "reason": "no nvidia-smi on this machine"}'
  exit 3
fi

if [ ! -f "$input" ]; then
  tensor=${TENSOR:-.venv/tensor}
  [ -x "$tensor/bin/python" ] || make "$tensor/.done" ${PYTHON:+PYTHON="$PYTHON"} >&2
  bench "$tensor/bin/python" prepare "$input"
fi
[ "$mode" != --prepare ] || exit 0

if [ "$mode" = --dry ]; then
  bench "${TENSOR:-.venv/tensor}/bin/python" measure "$input" --dry ${JSON:+--json "$JSON"}
  exit
fi

# ONNX Runtime's CUDA build brings its own CUDA and cuDNN by the extras; it lags the CPU build's version by one.
venv=.venv/gpu
if [ ! -f "$venv/.done" ]; then
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip --quiet install ${WHEELS:+--no-index --find-links "$WHEELS"} \
    'onnxruntime-gpu[cuda,cudnn]==1.31.1' numpy msgspec pydantic pydantic-settings structlog >&2
  touch "$venv/.done"
fi
timeout 240 bash -c "$(declare -f bench); bench $venv/bin/python measure $input ${JSON:+--json '$JSON'}"
