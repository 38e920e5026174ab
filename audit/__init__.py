"""What judges: cases, truth, envelopes, controls, reports and the command line."""

__version__ = "0.1.0"
