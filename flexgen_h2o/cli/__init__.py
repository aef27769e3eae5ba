"""The command line: the table of flags, run configuration, input and output files."""
