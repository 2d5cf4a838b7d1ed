"""The conformance kit, for the authors of plugins. Its modules import torch where they need it; the core does not.

`distribution`, `kernel`, `model`, `parser` and `policy` have a class each to inherit, whose questions are tests;
`verdicts` asks them of what is installed. The other modules are what these are made of.
"""
