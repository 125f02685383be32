#!/bin/sh
# Takes out of a venv what serving never loads: `slim.sh /opt/baton`.
set -eu

site=$(echo "$1"/lib/python3.*/site-packages)

# Headers, test programs and the protobuf compiler are for those who build on torch.
rm -rf "$site/torch/include" "$site/torch/test"
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete

# NIXL comes twice, for CUDA 12 and for CUDA 13, each with kernels for expert parallelism.
# One is enough: the one that fits torch, or any where torch knows no CUDA.
cuda=$("$1/bin/python" -c 'import torch; print((torch.version.cuda or "13").split(".")[0])')
for other in 12 13; do
    [ "$other" = "$cuda" ] || rm -rf "$site"/*nixl_cu$other*
done
rm -rf "$site"/nixl_ep*
