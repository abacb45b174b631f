"""The schema of results on disk, which results/README.md explains. The module imports nothing."""

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
    "warmup": 0.0,
    "schedule_floor": 0.0,
    "clip_norm": 0.0,
}
"""Keys that were added to the config later, with the value that stands for the earlier behaviour.

A stored row without the key is read as if it had this value. The hash of a config leaves out a key
that has this value, so that a config of before keeps its hash and its folder."""
