"""`tokenspeed plugins` and `tokenspeed env`: what is installed, why it is used or not, and what would mend it."""
