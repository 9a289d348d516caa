"""One step's gradients on their way: contributed, fused, in flight, means, and read again."""
