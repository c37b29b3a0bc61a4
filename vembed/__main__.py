"""Entry point of `python -m vembed`: the vembed command."""

from vembed.cli.main import main

if __name__ == "__main__":
    main()
