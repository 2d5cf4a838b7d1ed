"""The scheduler: the typed lifecycle, the columns of running sequences, the pure policy and its application."""
