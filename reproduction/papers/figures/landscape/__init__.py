"""Figures and claims about the published policies of `policies/`, each against its own paper."""
