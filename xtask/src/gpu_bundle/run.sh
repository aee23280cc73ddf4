#!/bin/sh
# Runs every GPU test of this folder, then what measures, on this machine's GPU. Needs the GPU's driver and nothing else.
#
# Writes into $OUT (default: results, beside this file) a log of each program and tests.json, and prints a table. Fails if
# any program fails, or if tests pass because none was run. LIMIT: seconds that a program may take.
set -u
here=$(cd "$(dirname "$0")" && pwd) || exit 1
OUT=${OUT:-$here/results}
LIMIT=${LIMIT:-1800}
REQUIRE_GPU=1
export OUT REQUIRE_GPU
mkdir -p "$OUT" || exit 1

# A number from the line that ends a test program's log.
count() {
    sed -n "s/^test result: .* \([0-9][0-9]*\) $1;.*/\1/p" "$OUT/$2.log" | tail -n 1
}

ask_gpu() {
    answer=$(nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1 | tr -d '"\\')
    printf '%s' "${answer:-unknown}"
}

failures=0
programs=0
separator=
objects=

# run FOLDER PROGRAM ARGUMENTS...
run() {
    folder=$1 program=$2
    shift 2
    begin=$(date +%s)
    timeout -k 10 "$LIMIT" "$here/$folder/$program" "$@" >"$OUT/$program.log" 2>&1
    code=$?
    took=$(($(date +%s) - begin))
    passed=$(count passed "$program")
    failed=$(count failed "$program")
    skipped=$(grep -c '^skipped: ' "$OUT/$program.log")
    verdict=ok
    [ "$code" -eq 0 ] || verdict="failed with $code"
    if [ "$folder" = tests ] && [ "$code" -eq 0 ] && [ "${passed:-0}" -eq 0 ]; then
        verdict="ran no test"
    fi
    [ "$verdict" = ok ] || failures=$((failures + 1))
    programs=$((programs + 1))
    printf '%-40s %6s passed %6s failed %6s skipped %6s s   %s\n' \
        "$program" "${passed:--}" "${failed:--}" "$skipped" "$took" "$verdict"
    object="{\"program\": \"$program\", \"kind\": \"$folder\", \"exit\": $code, \"seconds\": $took,"
    object="$object \"passed\": ${passed:-null}, \"failed\": ${failed:-null}, \"skipped\": $skipped, \"verdict\": \"$verdict\"}"
    objects="$objects$separator
    $object"
    separator=,
}

stand_in=false
[ "${MESHSTEP_STANDIN:-}" != 1 ] || stand_in=true
gpu=$(ask_gpu name) driver=$(ask_gpu driver_version) commit=$(cat "$here/commit")
[ "$stand_in" = false ] || gpu="none, the stand-in for the driver"
echo "Meshstep $commit on: $gpu (driver $driver)"
for program in "$here"/tests/*; do
    # One thread: tests choose the order of a device's work, and share its memory. Their output says what was skipped.
    [ ! -f "$program" ] || run tests "$(basename "$program")" --test-threads 1 --show-output
done
for program in "$here"/bench/*; do
    [ ! -f "$program" ] || run bench "$(basename "$program")"
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
echo "$programs programs, $failures failed; $OUT/tests.json"
if [ "$failures" -ne 0 ]; then
    for log in "$OUT"/*.log; do
        echo "--- $log"
        tail -n 20 "$log"
    done
fi
[ "$programs" -ne 0 ] && [ "$failures" -eq 0 ]
