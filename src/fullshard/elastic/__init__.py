"""Elastic runs: agents that start the ranks of a run again, on who is left or has come."""
