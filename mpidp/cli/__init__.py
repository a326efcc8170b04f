"""The command line: `mpidp` and `python -m mpidp`."""
