"""One model that streams: its sites, hooks, passes and guards, and what a user holds."""
