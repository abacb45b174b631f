"""Predicts the time of a training step on a cluster, and plans a training job.

From the bottom up: `networks` (shapes), `traffic` (bytes, buckets), `transport` (what a library
achieves on a link), `clusters` (devices and links), `throughput` (forward and backward), `costs`
(encoding), `steps` (one step), `validation` (measured times and the error band, `predict
--validate`), `prediction` (`gcbench predict`), `links` (`predict --links`), `evidence` (accuracy
lost in stored runs), `measuring` (`advise --measure`) and `advice` (`gcbench advise`).
"""
