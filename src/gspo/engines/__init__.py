"""Who samples: engines continue token ids and return token ids with their log-probs.

An engine knows nothing of prompts, rewards or groups; the collector builds those.
"""
