"""Where compressing gradients makes a step shorter: many setups simulated, a few measured."""
