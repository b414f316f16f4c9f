"""The real machines under a virtual clock and a seeded, faulty network."""
