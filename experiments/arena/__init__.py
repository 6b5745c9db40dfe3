"""The leaderboard: policies on traces, loads and objectives."""
