"""The ``greenroom`` command."""
