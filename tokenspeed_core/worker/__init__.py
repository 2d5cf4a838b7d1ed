"""The runner: executes step plans on a device. Only here (and in `testing`) does the core import torch."""
