"""The kinds of records: each says which cases, which alternatives, and which ratios its summary holds."""
