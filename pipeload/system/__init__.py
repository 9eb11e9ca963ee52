"""The operating system: what this process holds and may hold, pages, files, locks. No torch."""
