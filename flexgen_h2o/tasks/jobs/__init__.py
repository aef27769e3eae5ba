"""Jobs of many requests: lines in, requests, answers, lines out. No torch."""
