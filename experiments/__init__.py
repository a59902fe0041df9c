"""The papers' claims, small and side by side. `python -m experiments --help`."""
