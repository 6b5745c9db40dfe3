"""From settings to everything that a run needs: the setup of each pool of replicas, servers, requests."""
