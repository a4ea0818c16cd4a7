"""
Benchmarks: each measure beside the floor that the server sets. Run ``make bench``.
"""
