"""Results on disk: the schema, the folder of a run, files of rows, and their reader. No torch."""
