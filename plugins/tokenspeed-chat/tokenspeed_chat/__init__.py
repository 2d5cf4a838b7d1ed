"""`tokenspeed chat`: a conversation in the terminal, with a running server or one started for it."""
