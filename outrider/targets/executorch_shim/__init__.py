"""Run ExecuTorch programs without torch: a small C++ shim over the libraries of the executorch wheel."""
