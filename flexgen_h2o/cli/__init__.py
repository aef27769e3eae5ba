"""The command line: one table of flags, what they make, and the files in and out."""
