#!/bin/sh
# Runs every GPU test of this folder, then what measures, on this machine's GPU. Needs the GPU's driver and nothing else.
#
# Tests of NCCL are skipped where there is no libnccl.so.2, neither in the loader's path nor of python3's packages. What
# measures has PyTorch run the same before and after it, if python3 has torch.
#
# Writes into $OUT (default: results, beside this file) a log of each program, tests.json, gpu-bench.json and
# torch-bench.json, and prints tables. Fails if any program fails, or if tests pass because none was run. LIMIT: seconds that
# a program may take.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
OUT=${OUT:-$here/results}
LIMIT=${LIMIT:-1800}
REQUIRE_GPU=1
export OUT REQUIRE_GPU
mkdir -p "$OUT" || exit 1
rm -f "$OUT"/*.log "$OUT"/tests.json "$OUT"/gpu-bench.json "$OUT"/torch-bench.json

# A number from the line that ends a test program's log.
count() {
    sed -n "s/^test result: .* \([0-9][0-9]*\) $1;.*/\1/p" "$OUT/$2.log" | tail -n 1
}

ask_gpu() {
    answer=$(nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '"\\')
    printf '%s' "${answer:-unknown}"
}

failures=0
skips=0
programs=0
separator=
objects=

# note FOLDER PROGRAM VERDICT EXIT SECONDS PASSED FAILED SKIPPED: a line of the table, and of tests.json.
note() {
    programs=$((programs + 1))
    printf '%-40s %6s passed %6s failed %6s skipped %6s s   %s\n' "$2" "${6:--}" "${7:--}" "$8" "$5" "$3"
    object="{\"program\": \"$2\", \"kind\": \"$1\", \"exit\": $4, \"seconds\": $5,"
    object="$object \"passed\": ${6:-null}, \"failed\": ${7:-null}, \"skipped\": $8, \"verdict\": \"$3\"}"
    objects="$objects$separator
    $object"
    separator=,
}

# run FOLDER PROGRAM ARGUMENTS...
run() {
    folder=$1 program=$2
    shift 2
    begin=$(date +%s)
    timeout -k 10 "$LIMIT" "$here/$folder/$program" "$@" >"$OUT/$program.log" 2>&1
    code=$?
    took=$(($(date +%s) - begin))
    passed=$(count passed "$program")
    verdict=ok
    [ "$code" -eq 0 ] || verdict="failed with $code"
    if [ "$folder" != bench ] && [ "$code" -eq 0 ] && [ "${passed:-0}" -eq 0 ]; then
        verdict="ran no test"
    fi
    [ "$verdict" = ok ] || failures=$((failures + 1))
    skipped=$(grep -c '^skipped: ' "$OUT/$program.log")
    note "$folder" "$program" "$verdict" "$code" "$took" "$passed" "$(count failed "$program")" "$skipped"
}

# Whether NCCL's library is missing altogether; one that cannot be used is for the tests to tell.
no_nccl() {
    probe=$here/nccl/meshstep-comm-suite
    "$probe" --exact nccl::processes::what_is_probed_is_printed --nocapture 2>/dev/null | grep -q '^probed: Err(NoLibrary'
}

# The folder of the NCCL that torch brings.
nccl_of_python() {
    python3 -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + "/lib")' 2>/dev/null
}

# One run of PyTorch; what it says is in torch.log.
torch() {
    if ! command -v python3 >/dev/null; then
        echo "skipped: no python3" >>"$OUT/torch.log"
    elif ! timeout -k 10 "$LIMIT" python3 "$here/gpu_torch.py" "$OUT" >>"$OUT/torch.log" 2>&1; then
        echo "PyTorch's run failed; see $OUT/torch.log"
        failures=$((failures + 1))
    fi
}

stand_in=false
[ "${MESHSTEP_STANDIN:-}" != 1 ] || stand_in=true
gpu=$(ask_gpu name) driver=$(ask_gpu driver_version) commit=$(cat "$here/commit")
[ "$stand_in" = false ] || gpu="none, the stand-in for the driver"
echo "Meshstep $commit on: $gpu (driver $driver)"
# One thread: tests choose the order of a device's work, and share its memory. Their output says what was skipped. The modules
# `cuda` and `nccl` are what needs a GPU; the rest of a program was tested without one.
for program in "$here"/tests/*; do
    [ ! -f "$program" ] || run tests "$(basename "$program")" --test-threads 1 --show-output cuda:: nccl::
done
if [ -d "$here/nccl" ]; then
    library=found
    if no_nccl; then
        of_python=$(nccl_of_python) && export LD_LIBRARY_PATH="$of_python${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        ! no_nccl || library=missing
    fi
    for program in "$here"/nccl/*; do
        if [ "$library" = found ]; then
            run nccl "$(basename "$program")" --test-threads 1 --show-output cuda:: nccl::
        else
            skips=$((skips + 1))
            note nccl "$(basename "$program")" "skipped: no libnccl.so.2" null 0 "" "" 0
        fi
    done
fi
for program in "$here"/bench/*; do
    [ -f "$program" ] || continue
    torch
    run bench "$(basename "$program")"
    torch
    echo
    cat "$OUT/$(basename "$program").log" "$OUT/torch.log"
    echo
done
cat >"$OUT/tests.json" <<END
{
  "commit": "$commit",
  "date": "$(date -u +%Y-%m-%dT%H:%M:%SZ)",
  "gpu": "$gpu",
  "driver": "$driver",
  "stand_in": $stand_in,
  "programs": [$objects
  ]
}
END
echo "$programs programs, $failures failed, $skips skipped; $OUT/tests.json"
[ "$skips" -eq 0 ] || echo "NOT RUN: tests of NCCL, for there is no libnccl.so.2"
if [ "$failures" -ne 0 ]; then
    for log in "$OUT"/*.log; do
        echo "--- $log"
        tail -n 20 "$log"
    done
fi
[ "$programs" -gt "$skips" ] && [ "$failures" -eq 0 ]
