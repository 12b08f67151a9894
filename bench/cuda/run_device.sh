#!/usr/bin/env bash
# Builds the standalone harness on a machine with a GPU, checks every CUDA operation, times them, prints a short table.
#
# usage: bench/cuda/run_device.sh [check | check-lookup | check-score | check-sampled | check-receive | check-32 | check-64] [time | time-decode | time-lookup | time-fold | time-score | time-sampled | time-prefill | time-scales] [sanitize] [profile]      default: check time
# environment: ARCH (default sm_90), OUT (where logs go, default a folder of the temporary directory)
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-${TMPDIR:-/tmp}/kvfold-cuda}
arch=${ARCH:-sm_90}
steps=(${@:-check time})
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
mkdir -p "$out"

flags=(-std=c++17 -O3 -arch="$arch" -lineinfo -use_fast_math -Icpp)  # fast math as in ggml-cuda
pids=()
compile() { nvcc "${flags[@]}" "$@" & pids+=($!); }
compile -c bench/cuda/harness.cu -o "$build/harness.o"
compile -c cpp/ops/kv_fold.cu -o "$build/fold.o"
compile -c cpp/ops/kv_store.cu -o "$build/store.o"
compile -c cpp/ops/kv_select.cu -o "$build/select.o"
compile -c cpp/ops/kv_score.cu -o "$build/score.o"
compile -c cpp/ops/kv_sample.cu -o "$build/sample.o"
compile -c cpp/ops/kv_receive.cu -o "$build/receive.o"
compile -c cpp/ops/kv_align.cu -o "$build/align.o"
compile -c cpp/ops/kv_align.cpp -o "$build/align_cpu.o"
compile -c cpp/ops/kv_score.cpp -o "$build/score_cpu.o"
compile -c cpp/ops/kv_sample.cpp -o "$build/sample_cpu.o"
compile -c cpp/ops/kv_receive.cpp -o "$build/receive_cpu.o"
compile -c cpp/ops/kv_select.cpp -o "$build/select_cpu.o"
compile -c cpp/ops/kv_attend_sparse.cpp -o "$build/sparse_cpu.o"
compile -c cpp/ops/kv_fold.cpp -o "$build/fold_cpu.o"
compile -c cpp/ops/rotate.cpp -o "$build/rotate.o"
compile -c cpp/format/fp4_codec.cpp -o "$build/codec.o"
extra=()
if [ "$arch" = sm_90 ]; then
    nvcc "${flags[@]/-arch=sm_90/-gencode=arch=compute_90a,code=sm_90a}" -Xptxas -v -c cpp/ops/attend_prefill_wgmma.cu -o "$build/wgmma.o" 2>"$out/ptxas-wgmma.txt" & pids+=($!)
    extra=("$build/wgmma.o")
    flags+=(-DKVFOLD_WGMMA)
fi
compile -Xptxas -v -c cpp/ops/kv_attend.cu -o "$build/attend.o" 2>"$out/ptxas.txt"
for p in "${pids[@]}"; do
    wait "$p"
done
nvcc -arch="$arch" "$build"/{harness,fold,store,select,score,sample,receive,align,align_cpu,score_cpu,sample_cpu,receive_cpu,fold_cpu,select_cpu,sparse_cpu,rotate,codec,attend}.o "${extra[@]}" -o "$build/harness"
harness=$build/harness

for step in "${steps[@]}"; do
    case $step in
        check | check-*)
            timeout 300 "$harness" "$step" >"$out/$step.txt" 2>&1 || true
            grep -E "FAIL|failed|error:" "$out/$step.txt" | head -40 || true
            tail -1 "$out/$step.txt"
            grep -o "error [0-9.e+-]*" "$out/$step.txt" | sort -g -k2 | tail -1 || true
            ;;
        time | time-*)
            timeout 240 "$harness" "$step" 2>&1 | tee "$out/$step.txt"
            ;;
        sanitize)
            for tool in memcheck racecheck; do
                timeout 280 compute-sanitizer --tool "$tool" "$harness" quick >"$out/$tool.txt" 2>&1 || true
                tail -2 "$out/$tool.txt" || true
            done
            ;;
        profile)
            for what in profile profile-short; do
                timeout 100 ncu --set full --clock-control none -k regex:attend_decode -s 3 -c 1 -f -o "$out/$what" "$harness" "$what" >"$out/ncu.log" 2>&1 || true
                ncu -i "$out/$what.ncu-rep" --page details >"$out/$what.txt" 2>&1 || true
                ncu -i "$out/$what.ncu-rep" --page source --csv >"$out/$what.csv" 2>&1 || true
                grep -E "Duration|Throughput|Executed Ipc|Occupancy|Registers Per|Hit Rate|Cycles Per Issued|Eligible" "$out/$what.txt" | head -30 || true
            done
            ;;
        *)
            echo "unknown step $step" >&2
            exit 1
            ;;
    esac
done
