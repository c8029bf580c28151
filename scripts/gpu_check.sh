#!/usr/bin/env bash
# What can only be seen on a GPU, in one call: the tests with the policy on cuda, the quickstart there, agreement of
# engine and learner in float32 and bfloat16, peak memory. Prints everything; fails at the first thing that is wrong.
#
#   scripts/gpu_check.sh [PYTHON]     PYTHON has torch with CUDA, transformers and this package's other dependencies
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
export PYTHONPATH=src PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
common=(--model.path "$out/model" --run.output_dir "$out/runs" --run.device cuda)

"$python" -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__, torch.cuda.get_device_name())'
"$python" -m gspo doctor
"$python" -m pytest -q -m 'not slow' tests/test_algorithms_losses.py tests/test_policy_logprobs.py tests/test_river.py
"$python" -m gspo train quickstart "${common[@]}" --model.autocast none --run.name float32
"$python" -m gspo train quickstart "${common[@]}" --run.name bfloat16 --run.steps 20
"$python" -m gspo check engine quickstart "${common[@]}" --model.autocast none
"$python" - <<'PY'
import torch

from gspo.policy.logprobs import selected_logprobs

hidden = torch.randn(2048, 1024, device="cuda", requires_grad=True)
head = torch.nn.Linear(1024, 151_936, bias=False, device="cuda")
targets = torch.randint(0, 151_936, (2048,), device="cuda")
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
selected_logprobs(hidden, head, targets)[0].sum().backward()
print(f"log-prob of 2,048 tokens at vocabulary 151,936: peak {(torch.cuda.max_memory_allocated() - before) / 1e9:.2f} GB")
PY
