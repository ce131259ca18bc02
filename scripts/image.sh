#!/usr/bin/env bash
# bash scripts/image.sh FOLDER cpu|cuda
# Makes an environment in FOLDER from the wheel in dist/, as the images of the Dockerfile and CI have it.
set -euo pipefail
folder=$(realpath -m "$1") kind=$2
cd "$(dirname "$0")/.."
case $kind in
  cpu) extras=data,lora,vision index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu} ;; # PyPI's torch brings CUDA along
  cuda) extras=data,qlora,vision,linear,ray index=${TORCH_INDEX-} ;;
  *) echo "$kind: give cpu or cuda" >&2; exit 2 ;;
esac
wheels=(dist/*.whl)
[ -f "${wheels[0]}" ] && [ ${#wheels[@]} = 1 ] || { echo "dist/: expected one wheel; try rm -r dist && make wheel" >&2; exit 2; }
python3 -m venv "$folder"
"$folder/bin/pip" install --no-cache-dir ${index:+--extra-index-url "$index"} -c constraints.txt "${wheels[0]}[$extras]"
cd /  # no file of the source tree
"$folder/bin/saccade" --version
"$folder/bin/saccade" algorithms grpo
