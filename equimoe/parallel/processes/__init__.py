"""A run of many processes: which one this is, where they meet, and what they agree on."""
