"""Attention, decode and log-probability kernels for JAX."""

from setuptools import find_packages, setup

setup(
  name="gyre-kernels",
  version="0.1.0",
  description=__doc__,
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=find_packages(include=["gyre_kernels", "gyre_kernels.*"]),
  install_requires=["jax>=0.10.2,<0.12", "jaxtyping", "numpy"],
  extras_require={"gpu": ["jax-triton", "triton>=3.7.1"]},
)
