"""Measurements: Sartor against a plain loop and another library, and what a CPU step costs."""
