"""Speed of policies on this machine: each benchmark a command, `python -m experiments.bench NAME`, each writing results/<hardware>/NAME.json."""
