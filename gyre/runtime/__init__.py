"""Effects: the loop, its cell, checkpoints, metrics, evaluation."""
