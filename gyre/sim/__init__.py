"""The scheduler's decisions under a virtual clock."""
