"""The native CPU expert engine. ``library`` loads it; ``greenroom.experts.cpu`` is its face."""
