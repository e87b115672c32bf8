"""Attention timed against its peers: every implementation that is installed, checked first, interleaved after."""
