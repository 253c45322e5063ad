"""What a run's directory tells: loaded, tabulated, drawn."""
