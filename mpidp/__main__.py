"""`python -m mpidp`: the same as the `mpidp` command."""

from mpidp.cli.main import main

if __name__ == "__main__":
    main()
