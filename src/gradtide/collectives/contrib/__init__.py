"""Collectives and a partition that are kept as yardsticks: nothing recommends them.

They keep the same contract and pass the same tests as the others. Benchmarks hold the
recommended ones against them.
"""
