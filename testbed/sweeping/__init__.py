"""From a grid of configurations to a folder of measured cells."""
