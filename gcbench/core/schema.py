"""The schema of results on disk; results/README.md explains it. Light: imports nothing."""

SCHEMA = 1
PHASES = ("forward_backward", "statistic", "encode", "communicate", "decode", "update")
"""The phases of a step that are timed apart, in their order."""
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
ADDED: dict[str, object] = {
    "memory": "none",
    "memory_options": {},
    "start_step": 0,
    "delay": 0,
    "rebroadcast_every": 0,
    "task_version": 1,
    "holdout": 0,
    "test": True,
    "local_steps": 0,
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "outer_nesterov": False,
    "hook": "gcbench",
    "bucket_mb": 25.0,
}
"""Config keys that the first results did not have, and what those did: older rows read so, and in
the hash of a config they count where they say more, so that a config keeps its name."""
