"""`python -m saccade` is the `saccade` command, also from a source tree that is not installed."""

from saccade.cli import main

if __name__ == "__main__":  # spawned worker processes import this file too
    main()
