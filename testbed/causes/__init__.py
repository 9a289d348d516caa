"""Why each exposed millisecond of a recorded run is exposed; pure."""
