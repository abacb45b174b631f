"""The built-in compressors: one method a file, the file's name is the method's name."""
