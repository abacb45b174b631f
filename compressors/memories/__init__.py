"""The built-in memories: one memory per file, named after its file."""
