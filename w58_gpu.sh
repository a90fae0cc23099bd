#!/bin/bash
# The weight as it lies, on a machine with an H200 (or H100), from the root of a checkout of branch w58.
#
#   bash w58_gpu.sh build      epigemm into $PREFIX, by the machine's own torch and nvcc (about 3 minutes on 16 cores)
#   bash w58_gpu.sh check      values, stale scales, special numbers, existing tests of the kernels on slices (about 5 min)
#   bash w58_gpu.sh time       against the pack's kernel, the split at every call, TF32 and SGEMM (about 3 min)
#   bash w58_gpu.sh sanitize   memcheck and racecheck of every kernel at small sizes (about 5 min)
#
# One command of 10 minutes: build and check; a second one: time; a third one: sanitize. What is ignored by git and
# needed: CUTLASS's headers in $CUTLASS (include/ and tools/util/include/ of PyPI's nvidia-cutlass 4.2.0.0, 25 MB).
set -eu
HERE=$(cd "$(dirname "$0")" && pwd)
CUTLASS=${CUTLASS:-$PWD/.carry/cutlass}
PREFIX=${PREFIX:-$PWD/build/prefix}
OUT=${OUT:-$PWD/build/w58}
SCRIPT=${SCRIPT:-$HERE/w58_gpu.py}
mkdir -p "$OUT"

case "${1:?build, check, time or sanitize}" in
build)
  # Nothing is downloaded: no build isolation, no dependencies.
  python3 -m pip wheel . --no-deps --no-build-isolation -w build/whl -C build-dir=build/gpu \
    -C cmake.define.EPIGEMM_CUDA=ON -C cmake.define.EPIGEMM_ARCHITECTURES=90a \
    -C "cmake.define.EPIGEMM_CUTLASS_DIR=$CUTLASS" >"$OUT/build.log" 2>&1 || { tail -60 "$OUT/build.log"; exit 1; }
  rm -rf "$PREFIX" && python3 -m zipfile -e build/whl/epigemm-*.whl "$PREFIX"
  ;;
check)
  PYTHONPATH=$PREFIX:$PWD timeout 560 python3 "$SCRIPT" check --out "$OUT" | tee "$OUT/check.txt"
  ;;
time)
  PYTHONPATH=$PREFIX:$PWD timeout 560 python3 "$SCRIPT" time --out "$OUT" | tee "$OUT/time.txt"
  ;;
sanitize)
  for tool in memcheck racecheck; do
    PYTHONPATH=$PREFIX:$PWD timeout 280 compute-sanitizer --tool $tool --print-limit 20 --error-exitcode 9 \
      python3 "$SCRIPT" small --out "$OUT" >"$OUT/$tool.txt" 2>&1 && echo "$tool: nothing" || { echo "$tool: $?"; tail -40 "$OUT/$tool.txt"; }
  done
  ;;
esac
