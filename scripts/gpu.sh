#!/usr/bin/env bash
# Runs the named parts on a machine with a CUDA device, with the python3 that has torch and Triton there:
#   tests      the tests of whatever has kernels, and every other one with the marker gpu
#   sampler    freewheel bench sampler on random logits, with a plot
#   real       the same on the recorded logits in .logits/ (freewheel bench sampler --record), beside torch alone
#   softmax    temperature and softmax, apart and fused
#   decode     freewheel bench decode on random weights, beside transformers, with a plot and a trace
#   published  old ways against new, in one run each: draws, softmax, and a float32 copy of the logits
#   serve      a server under load, with a float32 copy of the logits and without; beside the engine offline (needs FastAPI)
#   bytes      what the sampler reads and writes, counted by the GPU; needs NVIDIA's ncu
# Logs, JSON and plots go to $OUT (default: gpu-results); a short table comes last. Wheels in .whl/ fill what python3
# lacks.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-gpu-results}
mkdir -p "$OUT"
if [ -d .whl ]; then
    python3 -m pip install -q --no-index --no-deps --target "${TMPDIR:-/tmp}/site" .whl/*.whl
    export PYTHONPATH="${TMPDIR:-/tmp}/site:$PWD/src"
else
    export PYTHONPATH="$PWD/src"
fi

failed=0
bench() { # NAME OPTION...
    local command="python3 -m freewheel bench sampler --device cuda --dtype bfloat16"
    $command --json "$OUT/$1.json" "${@:2}" >"$OUT/$1.log" 2>&1 || failed=1
}
decode() { # NAME OPTION...
    python3 -m freewheel bench decode --device cuda --json "$OUT/$1.json" "${@:2}" >"$OUT/$1.log" 2>&1 || failed=1
}
for part in "${@:-tests}"; do
    case $part in
    tests)
        workers=""
        python3 -c "import xdist" 2>/dev/null && workers="-n 14 --dist worksteal"
        # Whatever has kernels: what is interpreted elsewhere runs for real here.
        python3 -m pytest -q --tb=short -p no:cacheprovider $workers $(grep -rlE --include='test_*.py' "mark.gpu|importorskip\(.triton|fused: bool" tests) \
            >"$OUT/tests.log" 2>&1 || failed=1
        ;;
    sampler)
        bench sampler --vocab 151936 --batch 1,32,128,256 --plot "$OUT/sampler.png"
        ;;
    real)
        for file in .logits/*.safetensors; do
            name=real-$(basename "$file" .safetensors)
            bench "$name" --logits "$file" --batch 1,32,128,256 --systems torch,freewheel
        done
        ;;
    softmax)
        bench softmax --softmax
        ;;
    decode)
        decode decode --shape qwen3-0.6b --systems freewheel,transformers --batch 1,32,128 \
            --temperature 0.8 --top-k 50 --top-p 0.95 --plot "$OUT/decode.png" --trace "$OUT/decode-trace.json.gz"
        ;;
    published)
        for shape in qwen3-0.6b qwen3-1.7b; do
            decode "published-draws-$shape" --shape $shape --batch 1,32 --temperature 0.8 --repeats 5 \
                --draw multinomial,gumbel,two_level
        done
        bench published-softmax --softmax --batch 32,128,256
        decode published-float32-logits --shape qwen3-0.6b --batch 128 --temperature 1 --repeats 5 \
            --float32-logits --no-float32-logits
        ;;
    serve)
        for side in float32-logits offline; do
            python3 -m freewheel bench serve --compare $side --device cuda --shape qwen3-0.6b --concurrency 128 \
                --num-requests 512 --temperature 1 --ignore-eos --processes 4 \
                --json "$OUT/serve-$side.json" --plot "$OUT/serve-$side.png" >"$OUT/serve-$side.log" 2>&1 || failed=1
        done
        ;;
    bytes)
        bench bytes --bytes --vocab 151936
        ;;
    *)
        echo "unknown part: $part" >&2
        exit 2
        ;;
    esac
done
for log in "$OUT"/*.log; do
    echo "== $(basename "$log")"
    tail -n 40 "$log"
done
exit $failed
