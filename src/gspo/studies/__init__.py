"""Studies run the loop to learn about it; they stand above training and change nothing of a run."""
