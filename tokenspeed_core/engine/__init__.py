"""The engine: the step loop, the engine process, and the messages between the engine and its clients."""
