"""Greedy and random sampling."""
