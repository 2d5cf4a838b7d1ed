"""`tokenspeed run-batch`: answers the requests of a file without a server."""
