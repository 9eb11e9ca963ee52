#!/usr/bin/env bash
# Everything that only a card can tell, in under eight minutes, on a bare machine: torch and
# transformers, no network, no pytest. Checkpoints are random and made here.
#
#   tests/gpu/run.sh [FOLDER]      # scratch space: 24 GB; a folder in /tmp by default
#
# REHEARSE=1 goes through it with a device made of host memory, where there is no card.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
scratch=${1:-$(mktemp -d)}
mkdir -p "$scratch"
[ $# -ge 1 ] || trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH=$PWD:$PWD/hooks HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive PYTHONUNBUFFERED=1
export TMPDIR=$scratch
# What pipeload needs beside torch and transformers, and a bare machine may lack.
for module in psutil; do
    "$python" -c "import $module" 2>/dev/null || {
        echo "no $module here: a stand-in takes its place"
        export PYTHONPATH=$PYTHONPATH:$PWD/tests/gpu/stand_ins
    }
done

"$python" - <<'PY'
import importlib, platform, torch
print("python", platform.python_version(), "torch", torch.__version__)
for name in ("transformers", "safetensors", "accelerate", "bitsandbytes"):
    try:
        print(name, importlib.import_module(name).__version__)
    except Exception as error:
        print(name, "cannot be imported:", type(error).__name__)
if torch.cuda.is_available():
    card = torch.cuda.get_device_properties(0)
    print(card.name, f"{card.total_memory / 1e9:.0f} GB", "driver of CUDA", torch.version.cuda)
PY

# Checkpoints are made meanwhile: that asks the processor alone.
"$python" tests/gpu/speed.py --scratch "$scratch" --make >"$scratch/make.log" 2>&1 &
maker=$!
trap 'kill $maker 2>/dev/null' INT TERM
echo "=== checks ($SECONDS s)"
timeout 200 "$python" tests/gpu/checks.py
failed=$?
wait $maker || cat "$scratch/make.log"
sync
echo "=== speed ($SECONDS s)"
left=$((460 - SECONDS))
timeout $((left + 15)) "$python" tests/gpu/speed.py --scratch "$scratch" --seconds $((left - 45))
echo "=== done ($SECONDS s), checks failed: $failed"
exit "$failed"
