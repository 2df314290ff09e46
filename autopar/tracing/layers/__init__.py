"""Trace equal layers once: find them, record a few of their calls, repeat the ops of these for all others."""
