"""What a plan takes, and which is best: lifetimes in, actions out. Pure; no torch."""
