"""Many requests at once on one model: scheduling, sampling, streaming."""
