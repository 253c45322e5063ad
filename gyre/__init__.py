"""gyre: online RL for long-horizon LLM agents, in pure-functional JAX."""

__version__ = "0.1.0"
