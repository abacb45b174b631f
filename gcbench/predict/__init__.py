"""Predicts the time of a training step on a cluster, and recommends whether to compress.

From the bottom up: `networks` (shapes), `clusters` (devices and links), `throughput` (forward and
backward), `traffic` (bytes), `costs` (encoding), `steps` (one step), `prediction` (`gcbench
predict`), `links` (`predict --links`), `validation` (`predict --validate`), `evidence` (accuracy
lost in stored runs) and `advice` (`gcbench advise`).
"""
