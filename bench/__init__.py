"""Measure Sartor against a plain loop and another library, and the cost of a CPU step."""
