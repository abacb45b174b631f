"""Purposes of random numbers: one constant for each, so that no two share a stream."""

ENCODE = 0
MERGE = 1
ORDER = 2
AUGMENT = 3
NOISE = 4
HOLDOUT = 5
DROPOUT = 6
