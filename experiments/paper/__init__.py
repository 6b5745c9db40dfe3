"""The SARATHI paper (arXiv 2308.16369), and a measured run, against simulation: `python -m experiments.paper NAME`."""
