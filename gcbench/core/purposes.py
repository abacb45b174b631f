"""Purposes of random numbers, the values of `Key.stream`; different purposes never share a draw."""

ENCODE = 0
MERGE = 1
ORDER = 2
AUGMENT = 3
NOISE = 4
HOLDOUT = 5
DROPOUT = 6
SHARED = 7
ATTACK = 8
