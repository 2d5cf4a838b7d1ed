"""Kernel selection: the installed kernels, the user's overrides, and the plan of which kernel runs each op."""
