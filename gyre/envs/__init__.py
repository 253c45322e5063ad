"""Tasks, sandboxes, verifiers and the built-in agent loop."""
