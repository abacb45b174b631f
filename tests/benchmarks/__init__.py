"""Timings of every operation and every method; `make bench` runs them, the test suite does not."""
