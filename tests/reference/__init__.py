"""What other trainers compute, as far as it differs from ours: readings for the tests, never options of the library."""
