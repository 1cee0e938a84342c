"""Benchmarks: ``python -m benchmarks`` (``make bench``) on a machine with a CUDA device."""
