"""Conformance kit for plugin authors, and the fakes that the project's own tests use.

`distribution`, `grammar`, `kernel`, `model`, `parser` and `policy` each have a class to inherit; its methods
are tests. `report` runs them on an installed distribution.
"""
