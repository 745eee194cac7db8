"""Overlapped rounds: a soak with faults, the cost of handing over, and what they win on core sets."""
