"""The compiled loop over tokens, and the call of it for a block. Optional: ``analysis.sums`` computes the same by numpy."""
