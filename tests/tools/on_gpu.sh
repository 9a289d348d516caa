#!/usr/bin/env bash
# What is tested and measured on a machine with one GPU, each part within its seconds.
#
#     bash tests/tools/on_gpu.sh OUTPUT PART...       parts: tests peaks nccl sweep
#     traces codecs kineto
#
# OUTPUT gets a log of each part and what it made. NCCL_LIBRARY names a libnccl.so.2 of 2.30 or
# later, where torch brings an older one: two ranks on one GPU need it.
set -uo pipefail
cd "$(dirname "$0")/../.."
out=$(realpath -m "$1")
shift
mkdir -p "$out"
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
shared=(env NCCL_MULTI_RANK_GPU_ENABLE=1)
[ -n "${NCCL_LIBRARY:-}" ] && shared+=("LD_PRELOAD=$NCCL_LIBRARY")

# limited NAME SECONDS COMMAND...: one part, its log and a line of how it ended.
limited() {
  local name=$1 limit_s=$2 began_s=$SECONDS
  shift 2
  timeout -s INT -k 15 "$limit_s" "$@" >"$out/$name.log" 2>&1
  echo "$name: rc $? after $((SECONDS - began_s)) s: $(tail -n 1 "$out/$name.log" | cut -c1-150)"
}

checked() {
  local name=$1
  shift
  limited "tests-$name" "${TESTS_S:-150}" "$@" python3 -m pytest -q -p no:cacheprovider --durations 5 --timeout 60
}

tests() {
  local schedules=tests/contracts/test_schedule_gpu.py
  PYTEST_ADDOPTS="tests/unit tests/integration -m gpu --ignore tests/unit/test_memory_gpu.py" checked unit env &
  PYTEST_ADDOPTS="tests/unit/test_memory_gpu.py -m gpu" checked memory env &
  PYTEST_ADDOPTS="$schedules -m gpu -k mpi-ring-cuda" checked mpi-ring env &
  PYTEST_ADDOPTS="$schedules -m gpu -k mpi-cuda" checked mpi env &
  PYTEST_ADDOPTS="$schedules -m gpu -k gloo-cuda" checked gloo env &
  PYTEST_ADDOPTS="$schedules -m gpu -k zmq-ps-cuda" checked zmq-ps env &
  PYTEST_ADDOPTS="$schedules -m gpu -k nccl-cuda" checked nccl "${shared[@]}" &
  PYTEST_ADDOPTS="tests/contracts --ignore $schedules -k nccl" checked nccl-contract "${shared[@]}" &
  wait
}

peaks() {
  local memory=none,checkpoint,offload,laysa
  for workload in resnet50 densenet201 vgg16 bert-base; do
    limited "peaks-$workload" "${PEAKS_S:-150}" testbed sweep --name "peaks-$workload" \
      --output "$out/peaks-$workload" --workload "$workload" --batch-size 32 --backend none --workers 1 \
      --memory "$memory" --steps 12 --device cuda --repeats 1 --cell-timeout 100 --quiet &
  done
  wait
}

nccl() {
  limited nccl-comm "${NCCL_S:-60}" "${shared[@]}" testbed comm --backend nccl,gloo,mpi-ring,mpi,zmq-ps --workers 2 \
    --device cuda -b 4K -e 64M -f 4 -n 10 -w 3 -c 1 -J "$out/comm.json"
  limited nccl-run "${NCCL_S:-60}" "${shared[@]}" testbed run --workload resnet50 --batch-size 32 --backend nccl \
    --scheduler mg-wfbp --workers 2 --device cuda --steps 15 --timeline "$out/nccl-timeline.json" \
    --json "$out/nccl-run.json"
}

sweep() {
  limited sweep "${SWEEP_S:-100}" "${shared[@]}" testbed sweep --name gpu --output "$out/sweep" \
    --workload resnet50 --batch-size 32 --backend none,nccl,ddp,gloo,mpi-ring --workers 2 \
    --scheduler wfbp --steps 15 --device cuda --repeats 1 --cell-timeout 40 --quiet
}

traces() {
  mkdir -p "$out/traces"
  limited traces "${TRACES_S:-150}" python3 -m tests.tools.gpu_traces "$out/traces"
}

codecs() {
  limited codecs "${CODECS_S:-60}" testbed simulate --trace resnet50-v100 --link rate=10gbit,latency=50us \
    --workers 4 --device cuda --codecs-out "$out/codecs.json" --compressor \
    "fp16,bf16,ef+topk:ratio=0.01,ef+topk-sampled:ratio=0.01,powersgd,ef-sign,ef+onebit,terngrad,qsgd,natural,dgc"
}

kineto() {
  limited kineto 60 python3 -m tests.tools.gpu_traces "$out" --kineto
}

for part in "$@"; do "$part"; done
