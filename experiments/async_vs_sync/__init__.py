"""Asynchronous against synchronous training: quality and time."""
