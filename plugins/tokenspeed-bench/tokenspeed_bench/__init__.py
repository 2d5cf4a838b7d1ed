"""The command `tokenspeed bench`: seeded traffic, in process or over HTTP, and results that can be compared."""
