"""The page in Debian's Chromium, driven by playwright: what a person sees, and what an attacker's names do there."""
