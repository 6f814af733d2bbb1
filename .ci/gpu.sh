#!/usr/bin/env bash
# All that a GPU can show, in one folder: .ci/gpu.sh [FOLDER]. An hour or so; the same command goes on after a cut.
#
# Each step is a process with a limit, and the most useful ones come first. What a step prints is NAME.part.txt until it
# has ended well, then NAME.txt: such a step is done. NAME.log has its errors, README.md in the folder names all steps.
# PRESET, DEVICE, PYTHON and LIMIT (seconds of a step; `paper` has no limit, as it keeps each claim) may be set.
set -uo pipefail
cd "$(dirname "$0")/.."

ask_gpu() { nvidia-smi --id="${DEVICE#cuda:}" --query-gpu="$1" --format=csv,noheader,nounits; }
largest_preset() {  # with 16 bits, up to that of SARATHI's measurements on one GPU
    local mebibytes
    mebibytes=$(ask_gpu memory.total)
    if [ "$mebibytes" -ge 36000 ]; then echo llama-13b
    elif [ "$mebibytes" -ge 22000 ]; then echo llama3-8b
    elif [ "$mebibytes" -ge 8000 ]; then echo gpt2-xl
    else echo llama-160m; fi
}
DEVICE=${DEVICE:-cuda:0}
gpu=$(ask_gpu name) || { echo "DEVICE=$DEVICE: nvidia-smi knows no such GPU" >&2; exit 2; }
PRESET=${PRESET:-$(largest_preset)}
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
LIMIT=${LIMIT:-540}  # some machines end a command after ten minutes
folder=${1:-results/$(tr -cs 'a-z0-9\n' - <<<"${gpu,,}")}
[[ $PRESET == gpt2* ]] && max_len=1024 || max_len=4096
mkdir -p "$folder"
machine="$gpu, $PRESET, driver $(ask_gpu driver_version)"
[ "$(head -n 1 "$folder/README.md" 2>/dev/null || echo "# $machine")" = "# $machine" ] ||
    { echo "$folder: has results of another machine or preset" >&2; exit 2; }
echo "# $machine" >"$folder/README.md"
echo "$machine, results in $folder"

failed=0
step() {  # run the step NAME with a limit of SECONDS: its command follows
    local name=$1 limit=$2 began=$SECONDS status=0
    shift 2
    if [ ! -f "$folder/$name.txt" ]; then
        timeout --kill-after=20 "$limit" "$PYTHON" "$@" >"$folder/$name.part.txt" 2>"$folder/$name.log" || status=$?
        [ $status = 0 ] && mv "$folder/$name.part.txt" "$folder/$name.txt" || failed=1
    fi
    echo "- $name: status $status after $((SECONDS - began)) s: \`python $*\`" | tee -a "$folder/README.md"
}
bench() {  # a step of bench.py, with its numbers in NAME.json
    local name=$1
    shift
    step "$name" "$LIMIT" bench.py "$@" --preset "$PRESET" --device "$DEVICE" --json "$folder/$name.json"
}
trap 'echo "interrupted: the same command goes on"; exit 130' INT TERM

step tests "$LIMIT" -m pytest -q -rs tests/cuda tests/test_xformers.py test_equivalence.py
bench chunk-256 offline --chunk 256 --plot "$folder/chunk-256.png"
bench table-2 offline --chunk 1024 --batch 4 --seq-len 1024 --requests 9 --policies request-level,sarathi
sizes=(--batch 32 --max-len "$max_len")
bench serve serve --requests 160 "${sizes[@]}" --plot "$folder/serve.png"
bench capacity capacity --requests 128 "${sizes[@]}" --ratio 1.2 --policies vllm,sarathi-serve --plot "$folder/capacity.png"
batches=(1024 1024/256 6x1@1024 "250@1024 + 6x1@1024")
bench batches batches "${batches[@]}"
bench batches-compiled batches "${batches[@]}" --compile
step paper 0 bench.py paper --preset "$PRESET" --device "$DEVICE" --max-len "$max_len" --out "$folder"
echo "look at $folder/README.md, first at chunk-256.txt and table-2.txt"
exit $failed
