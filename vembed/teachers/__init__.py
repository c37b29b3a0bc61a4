"""Models that teach: their vectors and pair scores, cached on disk by content and given to the losses."""
