"""Options: the schema, reading them from files and command lines, and what FSDP makes of them. No torch in here."""
