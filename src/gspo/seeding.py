"""Counter-based seeds: stateless, so a resume has no generator state to restore."""

from __future__ import annotations

import hashlib

MAX_SEED = 2**63 - 1


def seed(run_seed: int, purpose: str, step: int = 0, index: int = 0) -> int:
    """Derive a seed in 0 .. 2**63 - 1 from (run_seed, purpose, step, index), the same on every machine.

    BLAKE2b over the four values: no relation between neighbouring steps or indices, no dependence on
    ``PYTHONHASHSEED``.
    """
    digest = hashlib.blake2b(f"{run_seed}|{purpose}|{step}|{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & MAX_SEED
