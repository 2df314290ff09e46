"""Comparison and exchange of small values between ranks."""
