"""Files of a run: rollouts in SQLite, arrays in safetensors, manifests."""
