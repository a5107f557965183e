"""The command line: one file a command, and one table of flags for all of them."""
