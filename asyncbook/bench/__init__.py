"""Benchmarks: every arm side by side in one run, results compared in the same run. Needs `asyncbook[bench]`."""
