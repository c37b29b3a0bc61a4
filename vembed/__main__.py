"""`python -m vembed` is the vembed command."""

from vembed.cli import main

if __name__ == "__main__":
    main()
