"""What compression costs in accuracy: rates searched, then seeds, on real gradients."""
