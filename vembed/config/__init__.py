"""Configuration: the option schema, readers of files and command lines, and FSDP settings. Imports no torch."""
