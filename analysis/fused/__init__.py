"""The compiled loops over tokens and over sequences, and the calls of them. Optional: numpy does the same (``sums``, ``rows``)."""
