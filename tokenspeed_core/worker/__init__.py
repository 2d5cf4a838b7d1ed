"""The worker: executes step plans on a device. No other package of the core imports torch."""
