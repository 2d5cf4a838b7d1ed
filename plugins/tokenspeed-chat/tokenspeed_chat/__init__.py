"""The command `tokenspeed chat`: a conversation in the terminal."""
