"""A reference evaluator for Core ML packages: runs the MIL program of a saved `.mlpackage` in numpy, on any system."""
