"""Published measurements of gradient exchange, beside what the simulator says of the setting."""
