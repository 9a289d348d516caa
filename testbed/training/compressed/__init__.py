"""A step's gradients where a compressor carries them: conversations instead of sums."""
