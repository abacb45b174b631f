"""The built-in memories, one per file, named after the file."""
