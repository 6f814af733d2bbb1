#!/usr/bin/env bash
# All that a GPU can show, in steps of at most LIMIT seconds: .ci/gpu.sh [FOLDER [TAR]]
#
# The same command goes on after a cut. A step that has ended, well or not, is NAME.txt in the folder; delete that file
# to run it again. NAME.log has its errors, README.md its status (124: LIMIT cut it). TAR holds the folder's files. It is
# unpacked where there are none, and written after each step. PRESET, DEVICE, PYTHON and LIMIT may be set.
set -uo pipefail
cd "$(dirname "$0")/.."
DEVICE=${DEVICE:-cuda:0}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
LIMIT=${LIMIT:-540}  # some machines end a command after ten minutes
export PYTHONWARNINGS="error:decodes run without CUDA graphs"

probe='
import sys, torch
torch.zeros(1, device=sys.argv[1])
gpu = torch.cuda.get_device_properties(sys.argv[1])
print(gpu.name, gpu.total_memory // 2**20, torch.__version__, sep="\n")'
properties=$("$PYTHON" -c "$probe" "$DEVICE") ||
    { echo "DEVICE=$DEVICE: torch cannot use it (PyPI's torch 2.13.0 needs driver 580 or newer)" >&2; exit 2; }
{ read -r gpu; read -r mebibytes; read -r torch; } <<<"$properties"

max_len=4096
serving=llama3-8b  # a token takes a sixth of the memory that it takes in LLaMA-13B
if [ "$mebibytes" -ge 75000 ]; then preset=llama-13b  # SARATHI's on one GPU
elif [ "$mebibytes" -ge 36000 ]; then preset=llama3-8b
elif [ "$mebibytes" -ge 22000 ]; then preset=llama3-8b max_len=2048
elif [ "$mebibytes" -ge 8000 ]; then preset=gpt2-xl serving=gpt2-xl
else preset=wide-160m serving=wide-160m; fi
serving=${PRESET:-$serving}
preset=${PRESET:-$preset}
[[ $preset != gpt2* ]] || max_len=1024

folder=${1:-results/$(tr -cs 'a-z0-9\n' - <<<"${gpu,,}")}
tar=${2:-}
heading="# $gpu, $preset, torch $torch"
mkdir -p "$folder"
[ -f "$folder/README.md" ] || [ ! -f "$tar" ] || tar -xf "$tar" -C "$folder"
[ -f "$folder/README.md" ] || echo "$heading" >"$folder/README.md"
[ "$(head -n 1 "$folder/README.md")" = "$heading" ] ||
    { echo "$folder: has other results than those of $heading" >&2; exit 2; }
echo "$heading, results in $folder"

failed=0
trap 'exit 130' INT TERM
step() {  # the step NAME, unless it has ended: a command of Python. It is measured if the code in `needs` runs
    local name=$1 began=$SECONDS status=0 result
    shift
    [ ! -f "$folder/$name.txt" ] || return
    if result=$("$PYTHON" -c "${needs:-}" 2>&1); then
        timeout --foreground --kill-after=20 "$LIMIT" "$PYTHON" "$@" \
            >"$folder/part.txt" 2>"$folder/$name.log" || status=$?
        [ $status = 0 ] || failed=1
        result="status $status after $((SECONDS - began)) s"
    else
        result="not measured, ${result##*$'\n'}"
        echo "$result" >"$folder/part.txt"
    fi
    mv "$folder/part.txt" "$folder/$name.txt"
    echo "- $name: $result: \`python $*\`" | tee -a "$folder/README.md"
    [ -z "$tar" ] || tar -cf "$tar" -C "$folder" .
}
bench() {  # the step NAME: a command of bench.py with a PRESET, and its numbers in NAME.json
    step "$1" bench.py "${@:3}" --preset "$2" --device "$DEVICE" --json "$folder/$1.json"
}

pytest=(-m pytest -q -rs -o addopts= -m "not slow")  # no xdist is needed
step tests "${pytest[@]}" test_equivalence.py tests/cuda/test_numbers.py
step tests-cuda "${pytest[@]}" tests/cuda --ignore tests/cuda/test_numbers.py
bench chunk-256 "$preset" offline --chunk 256 --plot "$folder/chunk-256.png"
bench table-2 "$preset" offline --chunk 1024 --batch 4 --seq-len 1024 --requests 9 --policies request-level,sarathi
batches=(1024 1024/256 6x1@1024 "250@1024 + 6x1@1024")
bench batches "$preset" batches "${batches[@]}"
compiler='import subprocess, sysconfig; subprocess.run("gcc"); open(sysconfig.get_path("include") + "/Python.h")'
needs=$compiler bench batches-compiled "$preset" batches "${batches[@]}" --compile
bench chunk-256-sdpa "$preset" offline --chunk 256 --attention sdpa
needs="import xformers" bench chunk-256-xformers "$preset" offline --chunk 256 --attention xformers
load=(--requests 96 --batch 24 --max-len "$max_len")
bench serve "$serving" serve "${load[@]}" --plot "$folder/serve.png"
for policy in vllm sarathi-serve; do
    bench "capacity-$policy" "$serving" capacity "${load[@]}" --ratio 1.2 --policies $policy
done
claims=(S-F3,S-F4,S-F7,S-F8 S-F10,S-F13,SS-F9,SS-F14,SS-4.3 SS-F7,SS-T4 SS-F1 S-T4 S-F11 S-F9 SS-F10)
for part in "${claims[@]}"; do
    bench "paper-${part%%,*}" "$preset" paper "$part" --on here
done
exit $failed
