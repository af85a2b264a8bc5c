"""The code of README.md and docs/ runs."""
