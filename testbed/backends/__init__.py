"""Ways of exchanging gradients, all behind one protocol."""
