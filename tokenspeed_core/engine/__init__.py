"""The engine: the step loop, the process around it, and the messages between it and its clients."""
