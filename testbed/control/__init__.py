"""The control plane: small messages between all members of a job, and the watch over them."""
