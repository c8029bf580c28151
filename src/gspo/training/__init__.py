"""The loop and what surrounds it: building a run from a recipe, cold start, checkpoints, preflight."""
