"""Search over the options that matter most: `vembed tune`."""
