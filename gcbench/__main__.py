"""`python -m gcbench`: the same as the console script."""

from gcbench.cli import main

if __name__ == "__main__":
    main()
