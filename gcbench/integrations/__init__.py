"""The compressors inside other training jobs: `comm_hook` for DDP, `shard_hook` for FSDP2."""
