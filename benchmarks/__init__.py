"""Measurements of Outrider, side by side with its peers; see benchmarks/README.md."""
