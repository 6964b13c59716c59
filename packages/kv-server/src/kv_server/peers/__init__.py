"""Peers: servers of several hosts that read each other's chunks."""
