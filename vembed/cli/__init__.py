"""The command line: signatures of the commands here, their work in `commands/`, one file per command."""
