"""Tools that look at data or make them: init, audit, judge, generate."""
