"""The built-in tasks: one a file, the file's name is the task's name."""
