"""The schema of results on disk, which results/README.md explains."""

SCHEMA = 1
METRIC_COLUMNS = (
    "kind",
    "step",
    "train_loss",
    "lr",
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "payload_bytes_up",
    "payload_bytes_down",
    "wire_bytes",
    "seconds",
)
"""Columns of metrics.parquet, in their order."""
