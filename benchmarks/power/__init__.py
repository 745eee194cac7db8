"""Simulated runs of the governor against fixed plans, an oracle and its parts; every figure is simulated."""
