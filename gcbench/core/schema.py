"""Names that both runs and readers of their results use. The module imports nothing."""

PHASES = ("forward_backward", "statistic", "encode", "communicate", "decode", "update")
"""The phases of a step that are timed separately, in their order."""
UPDATE_RULE = ("optimizer", "momentum", "nesterov")
"""Settings of `Compressor.recipe` that define how the decoded mean is applied."""
