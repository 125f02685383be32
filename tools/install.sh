#!/bin/sh
# Create .venv and install Baton into it: `tools/install.sh [EXTRA]`, EXTRA as in pyproject.toml.
#
# constraints.txt has the versions. Without an NVIDIA GPU, the CPU build of torch is installed, which
# needs no CUDA libraries. TORCH selects another build, TORCH_INDEX the package index to install it
# from. Packages are installed by uv with the settings of pip, or by pip where uv fails.
set -eu

extra=${1:-}
python=${PYTHON:-python3}
venv=.venv
cpu_builds=https://download.pytorch.org/whl/cpu  # PyTorch's own index, used if the default one lacks the build

"$python" - <<'PYTHON' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"Baton needs Python 3.11 or newer; this one is {sys.version.split()[0]}. Set PYTHON=…")
PYTHON

[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"

# Compile the kernels for this CPU into the user's cache while packages are downloaded, so that the
# first `baton up` finds them.
"$python" -m baton.engine.runner.kernels.build >"$venv/kernels.log" 2>&1 &
kernels=$!
bytecode=
trap 'kill $kernels $bytecode 2>/dev/null || true' EXIT
pip="$venv/bin/python -m pip --disable-pip-version-check install"
if $pip --quiet --constraint constraints.txt uv 2>"$venv/uv.log"; then
    eval "$("$venv/bin/python" tools/uv_environment.py)"
    uv="$venv/bin/uv pip install --python $venv/bin/python"
fi

install() {
    if [ -n "${uv:-}" ]; then
        $uv "$@" && return
        echo "uv could not install this; trying pip" >&2
    fi
    $pip "$@"
}

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

install_torch() { # without what it needs, which the index of a build may lack
    index=${TORCH_INDEX:+--index-url $TORCH_INDEX}
    if [ -n "${TORCH:-}" ]; then
        install --no-deps $index "$TORCH"
    elif [ "$(uname -sm)" != "Linux x86_64" ] || has_gpu; then
        install --no-deps $index torch==2.13.0
    elif ! install --no-deps $index "torch==2.13.0+cpu" &&
        ! install --no-deps --index-url "$cpu_builds" "torch==2.13.0+cpu"; then
        echo "The package index has no CPU build of torch 2.13.0, and the default build needs" >&2
        echo "gigabytes of CUDA libraries. Set TORCH_INDEX to an index with the CPU build, or" >&2
        echo "TORCH=torch==2.13.0 to install the default build anyway." >&2
        exit 1
    fi
}

"$venv/bin/python" -c 'import torch' 2>/dev/null || install_torch
# uv compiles no bytecode. torch has most of it, which all processes would compile at first start.
"$venv/bin/python" -c 'import torch' 2>/dev/null &
bytecode=$!
install --quiet --constraint constraints.txt --editable ".${extra:+[$extra]}"

wait $bytecode || true
kill -0 $kernels 2>/dev/null && echo "building kernels for this CPU, once"
wait $kernels || true
tail -n 1 "$venv/kernels.log"
