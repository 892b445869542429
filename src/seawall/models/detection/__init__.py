"""Failure detection: detectors for one peer, and group membership by gossip."""
