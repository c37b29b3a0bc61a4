"""Several commands from one config: training stages in order, and the search of options."""
