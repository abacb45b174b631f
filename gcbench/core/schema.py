"""The schema of results on disk (`gcbench help reading-results`). The module imports nothing."""

SCHEMA = 1
PHASES = ("forward_backward", "statistic", "encode", "communicate", "decode", "update")
"""The phases of a step that are timed separately, in their order."""
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
