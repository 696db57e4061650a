"""The program behind `make demo`: a real model's prefix leaves one process and comes back in another."""
