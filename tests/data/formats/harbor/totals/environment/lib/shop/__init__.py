"""The shop's library."""
