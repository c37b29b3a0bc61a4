"""From a data file to a config: the file's first records, its columns guessed by content, values that fit."""
