"""Measuring on a machine, real or simulated: profiles, simulated days, calibration, heat played back."""
