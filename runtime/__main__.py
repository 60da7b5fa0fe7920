"""`python -m runtime` is the command `lockstep`."""

from runtime.cli import main

if __name__ == "__main__":
    main()
