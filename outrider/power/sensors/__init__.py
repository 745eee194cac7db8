"""Sources of telemetry, one small file each."""
