"""The quickstart's promise, measured: held-out greedy accuracy before and after on several seeds, and the control.

    python benchmarks/quickstart.py --seeds 0 1 2 --threads 2

Prints one JSON line a run: arm, seed, accuracy before and after (1,000 held-out items), seconds in all and by phase
(wall clock, cold start included). The control arm shuffles rewards between rollouts; it must not rise by over 0.05.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

import gspo

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def run(arm: str, seed: int, root: Path, threads: int) -> dict[str, object]:
    """One run of one arm."""
    overrides: dict[str, object] = {
        "run.seed": seed,
        "run.output_dir": str(root / arm),
        "model.path": str(root / f"model-{arm}-{seed}"),
        "run.threads": threads,
    }
    if arm == "shuffled":
        overrides["algorithm.advantage"] = "shuffled:shuffled"
    start = time.perf_counter()
    folder = gspo.train("quickstart", overrides=overrides, quiet=True)
    seconds = time.perf_counter() - start
    metrics = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [m["eval/accuracy"] for m in metrics if "eval/accuracy" in m]
    timings = [json.loads(line)["timings"] for line in (folder / "timings.jsonl").read_text().splitlines()]
    phases = {name: sum(t.get(name, 0.0) for t in timings) for name in timings[0]}
    return {
        "arm": arm,
        "seed": seed,
        "before": accuracy[0],
        "after": accuracy[-1],
        "rise": round(accuracy[-1] - accuracy[0], 4),
        "curve": accuracy,
        "seconds": round(seconds, 1),
        "phases_s": {name: round(value, 1) for name, value in phases.items()},
    }


def main() -> None:
    """Run both arms on every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--arms", nargs="+", choices=["gspo", "shuffled"], default=["gspo", "shuffled"])
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for arm in arguments.arms:
            for seed in arguments.seeds:
                print(json.dumps(run(arm, seed, Path(root), arguments.threads)), flush=True)


if __name__ == "__main__":
    main()
