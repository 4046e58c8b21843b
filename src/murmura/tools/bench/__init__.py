"""Benchmarks: murmura beside its peers, measured in one run by the same processes. No output, no command line."""
