"""The compressors inside training jobs that are not gcbench's own: `gcbench.comm_hook` for DDP."""
