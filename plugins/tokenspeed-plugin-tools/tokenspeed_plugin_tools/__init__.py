"""The commands `tokenspeed plugins` and `tokenspeed env`, and the check of plugins before a start."""
