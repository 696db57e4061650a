"""Ranks as real processes over gloo, what they run, and faults that strike them."""
