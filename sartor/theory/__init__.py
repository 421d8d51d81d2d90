"""The theory as pure functions of numbers or of client data."""
