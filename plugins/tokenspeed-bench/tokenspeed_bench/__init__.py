"""The command `tokenspeed bench`: seeded traffic in process or over HTTP, and comparison of results."""
