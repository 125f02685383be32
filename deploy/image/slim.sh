#!/bin/sh
# Removes files from a venv that serving never loads: `slim.sh /opt/baton`.
set -eu

site=$(echo "$1"/lib/python3.*/site-packages)

# Headers, test programs and the protobuf compiler are only needed to build against torch.
rm -rf "$site/torch/include" "$site/torch/test"
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete

# NIXL is installed twice, for CUDA 12 and 13, each with expert-parallel kernels. Keep the one that
# matches torch, or either one with a CPU build of torch.
cuda=$("$1/bin/python" -c 'import torch; print((torch.version.cuda or "13").split(".")[0])')
for other in 12 13; do
    [ "$other" = "$cuda" ] || rm -rf "$site"/*nixl_cu$other*
done
rm -rf "$site"/nixl_ep*
